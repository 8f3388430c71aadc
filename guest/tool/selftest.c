// SPDX-License-Identifier: GPL-2.0
/*
 * ebb-guest-tool --self-test: the pure parts, on any machine.
 */
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

#define CHECK(cond) do {						\
	if (!(cond)) {							\
		failures++;						\
		fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond);	\
	}								\
} while (0)

static const char *parse(const char *text, struct cmd *c)
{
	static char line[IN_MAX];

	snprintf(line, sizeof(line), "%s", text);
	return cmd_parse(line, c);
}

static void test_parser(void)
{
	static const char *const nonsense[] = {
		"", " ", "x ping", "-1 ping", "7", "1 v =x", "1 v key", "1 v k=%", "1 v k=%4",
		"1 v k=%zz", "1 v k=%00", "1 v K=1", "1 v k=1 k=2", "99999999999999999999 v",
		"1 v a=1 b=1 c=1 d=1 e=1 f=1 g=1 h=1 i=1 j=1 k=1 l=1 m=1 n=1 o=1 p=1 q=1",
	};
	struct cmd c;

	for (size_t i = 0; i < sizeof(nonsense) / sizeof(*nonsense); i++)
		CHECK(parse(nonsense[i], &c));
	CHECK(!parse("7 start job=a size=4096 text=a%20b%25 share=0.25", &c));
	CHECK(c.id == 7 && !strcmp(c.verb, "start") && c.nargs == 4);
	CHECK(cmd_u64(&c, "size", 0) == 4096 && cmd_u64(&c, "none", 5) == 5 && !c.bad);
	CHECK(!strcmp(cmd_str(&c, "text", ""), "a b%"));
	CHECK(cmd_fraction(&c, "share", 1) == 0.25);
	CHECK(!strcmp(cmd_leftover(&c), "job"));
	CHECK(cmd_u64(&c, "text", 9) == 9 && !strcmp(c.bad, "text"));
	CHECK(!parse("1 v share=1.5 n=12x", &c));
	CHECK(cmd_fraction(&c, "share", 0.5) == 0.5 && !strcmp(c.bad, "share"));
}

static void test_json(void)
{
	static struct json j;
	static char big[OUT_MAX];

	json_start(&j);
	json_u64(&j, "a", 1);
	json_str(&j, "b", "q\"\\\n\xff", 5);
	json_bool(&j, "c", true);
	json_fragment(&j, "\"d\":2");
	CHECK(json_end(&j));
	CHECK(!strcmp(j.buf, "\"a\":1,\"b\":\"q\\\"\\\\\\u000a\\u00ff\",\"c\":true,\"d\":2"));
	memset(big, 'x', sizeof(big));
	json_str(&j, "e", big, sizeof(big));
	CHECK(!json_end(&j));
}

static void test_pages(void)
{
	static u64 a[PAGE_WORDS], b[PAGE_WORDS], zero[PAGE_WORDS];
	struct fill mixed = { .pattern = PAT_TEMPLATE, .share = 0.2, .cluster = 8, .seed = 1, .common = 9 };
	u64 want, got, same = 0;

	CHECK(!page_check(zero, 1, 2, 0, &want, &got));
	CHECK(page_check(zero, 1, 2, 1, &want, &got));
	page_seal(a, 1, 2, 3);
	CHECK(!page_check(a, 1, 2, 3, &want, &got));
	CHECK(page_check(a, 2, 2, 3, &want, &got) && page_check(a, 1, 3, 3, &want, &got));
	CHECK(page_check(a, 1, 2, 4, &want, &got) && want == 4 && got == 3);
	CHECK(page_check(a, 1, 2, 0, &want, &got));
	for (size_t bit = 0; bit < PAGE * 8; bit++) {
		a[bit / 64] ^= 1ULL << bit % 64;
		CHECK(page_check(a, 1, 2, 3, &want, &got));
		a[bit / 64] ^= 1ULL << bit % 64;
	}
	for (u64 i = 0; i < 4000; i++) {
		page_fill(a, &mixed, i);
		mixed.seed = 2;
		page_fill(b, &mixed, i);
		mixed.seed = 1;
		same += !memcmp(a, b, PAGE);
	}
	CHECK(same > 500 && same < 1100);
	CHECK(pattern_named("template") == PAT_TEMPLATE && pattern_named("x") == PAT_BAD);
}

static void test_sort(void)
{
	enum { N = 10000 };
	static u32 v[N], spare[N];
	u64 rng = 5;

	for (int i = 0; i < N; i++)
		v[i] = (u32)rng_next(&rng);
	sort_u32(v, spare, N);
	for (int i = 1; i < N; i++)
		CHECK(v[i - 1] <= v[i]);
}

int self_test(void)
{
	test_parser();
	test_json();
	test_pages();
	test_sort();
	printf("ebb-guest-tool: self-test %s\n", failures ? "FAILED" : "passed");
	return failures != 0;
}
