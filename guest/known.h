/* SPDX-License-Identifier: GPL-2.0 */
#ifndef EBB_KNOWN_H
#define EBB_KNOWN_H

#ifndef __KERNEL__
#include <stdbool.h>
#endif

bool ebb_build_known(const char *release, const char *version);

#endif /* EBB_KNOWN_H */
