// SPDX-License-Identifier: GPL-2.0
/*
 * Command lines in, JSON lines out.  Everything is bounded: a line has at most
 * IN_MAX bytes and NARGS_MAX arguments, an answer OUT_MAX bytes; an answer that
 * does not fit becomes an error, never half a line.
 */
#include "tool.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int hex(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool unescape(char *s)
{
	char *to = s;

	for (; *s; s++) {
		if (*s != '%') {
			*to++ = *s;
			continue;
		}
		if (hex(s[1]) < 0 || hex(s[2]) < 0)
			return false;
		*to = (char)(hex(s[1]) * 16 + hex(s[2]));
		if (!*to++)
			return false;
		s += 2;
	}
	*to = 0;
	return true;
}

static bool parse_u64(const char *s, u64 *v)
{
	char *end;

	if (!isdigit((unsigned char)*s))
		return false;
	errno = 0;
	*v = strtoull(s, &end, 10);
	return !errno && !*end;
}

static const char *parse_arg(char *word, struct cmd *c)
{
	char *eq = strchr(word, '=');

	if (!eq || eq == word)
		return "an argument is not key=value";
	if (c->nargs == NARGS_MAX)
		return "too many arguments";
	*eq = 0;
	for (char *k = word; *k; k++)
		if (!islower((unsigned char)*k) && !isdigit((unsigned char)*k) && *k != '_')
			return "a key has odd characters";
	for (int i = 0; i < c->nargs; i++)
		if (!strcmp(c->arg[i].key, word))
			return "a key is given twice";
	if (!unescape(eq + 1))
		return "a value has a bad %XX escape";
	c->arg[c->nargs++] = (struct arg){ .key = word, .value = eq + 1 };
	return NULL;
}

/* Takes a line apart in place; returns what is wrong with it, or NULL. */
const char *cmd_parse(char *line, struct cmd *c)
{
	char *save = NULL;
	char *word = strtok_r(line, " ", &save);

	memset(c, 0, sizeof(*c));
	if (!word || !parse_u64(word, &c->id)) {
		c->id = 0;
		return "a line starts with a number";
	}
	c->verb = strtok_r(NULL, " ", &save);
	if (!c->verb)
		return "no verb";
	while ((word = strtok_r(NULL, " ", &save))) {
		const char *why = parse_arg(word, c);

		if (why)
			return why;
	}
	return NULL;
}

const char *cmd_str(struct cmd *c, const char *key, const char *def)
{
	for (int i = 0; i < c->nargs; i++) {
		if (!strcmp(c->arg[i].key, key)) {
			c->arg[i].used = true;
			return c->arg[i].value;
		}
	}
	return def;
}

u64 cmd_u64(struct cmd *c, const char *key, u64 def)
{
	const char *s = cmd_str(c, key, NULL);
	u64 v = def;

	if (s && !parse_u64(s, &v) && !c->bad)
		c->bad = key;
	return v;
}

double cmd_fraction(struct cmd *c, const char *key, double def)
{
	const char *s = cmd_str(c, key, NULL);
	char *end;
	double v;

	if (!s)
		return def;
	v = strtod(s, &end);
	if (end == s || *end || !isfinite(v) || v < 0 || v > 1) {
		if (!c->bad)
			c->bad = key;
		return def;
	}
	return v;
}

/* The first key nobody asked for, so that a typing error is not silence. */
const char *cmd_leftover(const struct cmd *c)
{
	for (int i = 0; i < c->nargs; i++)
		if (!c->arg[i].used)
			return c->arg[i].key;
	return NULL;
}

__attribute__((format(printf, 2, 3)))
static void put(struct json *j, const char *fmt, ...)
{
	size_t room = sizeof(j->buf) - j->len;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(j->buf + j->len, room, fmt, ap);
	va_end(ap);
	if (n < 0 || (size_t)n >= room)
		j->overflow = true;
	else
		j->len += (size_t)n;
}

/* A fragment: fields without the braces around them. */
void json_start(struct json *j)
{
	j->len = 0;
	j->overflow = false;
	j->buf[0] = 0;
}

static void put_key(struct json *j, const char *key)
{
	put(j, "%s\"%s\":", j->len ? "," : "", key);
}

void json_u64(struct json *j, const char *key, u64 v)
{
	put_key(j, key);
	put(j, "%llu", (unsigned long long)v);
}

void json_i64(struct json *j, const char *key, int64_t v)
{
	put_key(j, key);
	put(j, "%lld", (long long)v);
}

void json_double(struct json *j, const char *key, double v)
{
	put_key(j, key);
	put(j, "%.6f", isfinite(v) ? v : 0.0);
}

void json_bool(struct json *j, const char *key, bool v)
{
	put_key(j, key);
	put(j, "%s", v ? "true" : "false");
}

/* Bytes above 126 are written as U+00XX: the line stays ASCII, whatever the
 * file held. */
void json_str(struct json *j, const char *key, const char *s, size_t len)
{
	put_key(j, key);
	put(j, "\"");
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)s[i];

		if (c == '"' || c == '\\')
			put(j, "\\%c", c);
		else if (c < 0x20 || c > 0x7e)
			put(j, "\\u%04x", c);
		else
			put(j, "%c", c);
	}
	put(j, "\"");
}

void json_text(struct json *j, const char *key, const char *s)
{
	json_str(j, key, s, strlen(s));
}

void json_fragment(struct json *j, const char *fragment)
{
	if (*fragment)
		put(j, "%s%s", j->len ? "," : "", fragment);
}

/* Whether everything fitted. */
bool json_end(struct json *j)
{
	return !j->overflow;
}
