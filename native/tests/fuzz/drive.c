/* drive.c — the engine under orders: a test's script on the command line.
 *
 * drive WORD…: each word is NAME=VALUE, which sets an option, or an action.
 * One line comes out per action: "ACTION rc=CODE …: MESSAGE". The last line says
 * which descriptors and mappings stayed behind. It always ends with status 0: any
 * other end is a crash or a sanitizer's.
 *
 *   model=DIR ctx= batch= threads= kv= weights= cache= none= policy= readers=
 *   buffered= noahead= onbad= onmiss= extra=BELOW hot= block= budget= over=
 *   deadline= pin=FILE isa=   options
 *   eio=FROM:EVERY            reads fail with EIO from the FROM-th on, EVERY-th ones
 *   slow=MS                   every read takes that long
 *   plan, open, close, golden, reset, counters
 *   eval=N                    N tokens in one call, hash of the logits
 *   step=N                    N tokens one at a time, hash of the logits
 *   gen=N                     a generated text of N tokens after 3 of prompt
 *   swap=DIR                  hot swap
 *   cut=FILE:SIZE, put=FILE:AT:BYTE, rm=FILE   damage while it runs
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "colibri.h"
#include "core/sha256.h"

static struct cb_options opt;
static struct cb_engine *engine;
static struct cb_info info;
static _Atomic unsigned long reads, eio_from, eio_every, slow_ms; /* readers look at them */
static uint32_t fed; /* tokens so far: the ids depend on it alone */

static int hook(void *ud, uint32_t shard, uint64_t offset, uint64_t n)
{
    (void)ud, (void)shard, (void)offset, (void)n;
    unsigned long i = ++reads, ms = slow_ms, every = eio_every;
    if (ms > 0) {
        struct timespec t = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000L};
        nanosleep(&t, NULL);
    }
    return every > 0 && i >= eio_from && i % every == 0 ? EIO : 0;
}

static _Atomic unsigned stuck;

static void on_stuck(void *ud, uint32_t layer, int32_t expert, uint64_t ms)
{
    (void)ud, (void)layer, (void)expert, (void)ms;
    stuck++;
}

static long count_lines(const char *path)
{
    FILE *f = fopen(path, "r");
    long n = 0;
    for (int c; f != NULL && (c = getc(f)) != EOF;)
        n += c == '\n';
    if (f != NULL)
        fclose(f);
    return n;
}

static long count_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    long n = 0;
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n;
}

static void say(const char *what, int rc, const struct cb_err *err)
{
    printf("%s rc=%d: %s\n", what, rc, rc != 0 ? err->msg : "");
    fflush(stdout);
}

static int32_t next_token(void)
{
    return (int32_t)((fed++ * 2654435761u + 12345u) % info.n_vocab);
}

/* n tokens in calls of `part`; the hash covers all logits and expert choices. */
static void eval(const char *what, uint32_t n, uint32_t part)
{
    struct cb_err err = {0, ""};
    struct cb_sha256 sha;
    char hex[65];
    int rc = 0;
    uint64_t V = info.n_vocab;
    int32_t *ids = malloc(((size_t)n + 1) * 4);
    float *all = malloc(((size_t)part * V + 1) * 4);
    int32_t *ex = malloc(((size_t)part * info.n_moe_layer * info.n_expert_used + 1) * 4);
    if (ids == NULL || all == NULL || ex == NULL)
        abort();
    for (uint32_t i = 0; i < n; i++)
        ids[i] = next_token();
    cb_sha256_init(&sha);
    for (uint32_t i = 0; rc == 0 && i < n; i += part) {
        rc = cb_eval(engine, ids + i, part, all, info.n_moe_layer > 0 ? ex : NULL, &err);
        if (rc == 0)
            cb_sha256_add(&sha, all, (size_t)(part * V * 4));
    }
    cb_sha256_hex(&sha, hex);
    printf("%s rc=%d pos=%u sha=%.16s: %s\n", what, rc, cb_position(engine),
           rc == 0 ? hex : "none", rc != 0 ? err.msg : "");
    fflush(stdout);
    free(ids);
    free(all);
    free(ex);
}

static int take_text(void *ud, const char *text, size_t n, int32_t id)
{
    size_t *sum = ud;
    (void)text, (void)id;
    *sum += n;
    return 0;
}

static void generate(uint32_t n)
{
    struct cb_err err = {0, ""};
    struct cb_sampling s;
    struct cb_gen_result res;
    size_t bytes = 0;
    int32_t prompt[3] = {next_token(), next_token(), next_token()};
    cb_sampling_default(&s);
    s.temperature = 1.0f;
    s.repeat_penalty = 1.1f;
    int rc = cb_generate(engine, prompt, 3, n, &s, NULL, 0, take_text, &bytes, &res, &err);
    say("gen", rc, &err);
}

static void counters(void)
{
    struct cb_counters c;
    cb_engine_counters(engine, &c);
    printf("counters hits=%llu misses=%llu evictions=%llu unhealthy=%llu degraded=%llu zeros=%llu "
           "retries=%llu swaps=%llu extra=%llu stuck=%llu told=%u recomputed=%llu\n",
           (unsigned long long)c.hits, (unsigned long long)c.misses,
           (unsigned long long)c.evictions, (unsigned long long)c.unhealthy,
           (unsigned long long)c.degraded, (unsigned long long)c.zeros,
           (unsigned long long)c.retries, (unsigned long long)c.swaps,
           (unsigned long long)c.extra, (unsigned long long)c.stuck, (unsigned)stuck,
           (unsigned long long)c.recomputed);
}

static void damage(const char *word)
{
    char file[1024];
    unsigned long at = 0;
    unsigned byte = 0;
    int rc = -1;
    if (sscanf(word, "rm=%1023s", file) == 1)
        rc = unlink(file);
    else if (sscanf(word, "cut=%1023[^:]:%lu", file, &at) == 2)
        rc = truncate(file, (off_t)at);
    else if (sscanf(word, "put=%1023[^:]:%lu:%u", file, &at, &byte) == 3) {
        int fd = open(file, O_WRONLY);
        unsigned char b = (unsigned char)byte;
        rc = fd >= 0 && pwrite(fd, &b, 1, (off_t)at) == 1 ? 0 : -1;
        close(fd);
    }
    printf("damage rc=%d\n", rc);
}

static int set_option(char *word)
{
    unsigned long from, every;
    const struct {
        const char *name;
        uint32_t *to;
    } numbers[] = {
        {"ctx=", &opt.ctx}, {"batch=", &opt.batch}, {"threads=", &opt.threads},
        {"kv=", &opt.kv_type}, {"weights=", &opt.weights}, {"cache=", &opt.cache_experts},
        {"none=", &opt.cache_none}, {"policy=", &opt.cache_policy}, {"readers=", &opt.readers},
        {"buffered=", &opt.buffered}, {"noahead=", &opt.no_lookahead}, {"onbad=", &opt.on_bad},
        {"onmiss=", &opt.on_miss}, {"hot=", &opt.hot_swap}, {"block=", &opt.lazy_block_mib},
        {"over=", &opt.over_budget}, {"deadline=", &opt.token_deadline_ms},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        size_t n = strlen(numbers[i].name);
        if (strncmp(word, numbers[i].name, n) == 0) {
            *numbers[i].to = (uint32_t)strtoul(word + n, NULL, 10);
            return 1;
        }
    }
    if (strncmp(word, "model=", 6) == 0)
        opt.model_dir = word + 6;
    else if (strncmp(word, "budget=", 7) == 0)
        opt.budget = strtoull(word + 7, NULL, 10);
    else if (strncmp(word, "isa=", 4) == 0)
        opt.isa = word + 4;
    else if (strncmp(word, "pin=", 4) == 0)
        opt.pin_file = word + 4;
    else if (strncmp(word, "extra=", 6) == 0) {
        opt.extra_expert = 1;
        opt.extra_below = strtof(word + 6, NULL);
    } else if (strncmp(word, "slow=", 5) == 0)
        slow_ms = strtoul(word + 5, NULL, 10);
    else if (sscanf(word, "eio=%lu:%lu", &from, &every) == 2) {
        eio_from = from;
        eio_every = every;
    } else
        return 0;
    return 1;
}

static void open_engine(void)
{
    struct cb_err err = {0, ""};
    opt.io_hook = hook;
    opt.on_stuck = on_stuck;
    int rc = cb_engine_open(&opt, &engine, &err);
    if (rc == 0)
        cb_engine_info(engine, &info);
    say("open", rc, &err);
}

static void plan(void)
{
    struct cb_err err = {0, ""};
    struct cb_ledger ledger;
    int rc = cb_plan(&opt, &ledger, &info, &err);
    printf("plan rc=%d total=%llu: %s\n", rc, (unsigned long long)ledger.total,
           rc != 0 ? err.msg : "");
}

static void act(char *word)
{
    struct cb_err err = {0, ""};
    char hex[65] = "";
    if (set_option(word))
        return;
    if (strcmp(word, "open") == 0)
        open_engine();
    else if (strcmp(word, "plan") == 0)
        plan();
    else if (strncmp(word, "cut=", 4) == 0 || strncmp(word, "put=", 4) == 0 ||
             strncmp(word, "rm=", 3) == 0)
        damage(word);
    else if (engine == NULL)
        printf("%s: nothing is open\n", word);
    else if (strcmp(word, "close") == 0) {
        cb_engine_close(engine);
        engine = NULL;
        printf("close\n");
    } else if (strcmp(word, "reset") == 0) {
        cb_reset(engine);
        fed = 0;
    } else if (strcmp(word, "golden") == 0) {
        int rc = cb_golden(engine, hex, &err);
        printf("golden rc=%d %s: %s\n", rc,
               rc == 0 && strcmp(hex, info.golden) == 0 ? "right" : "wrong", err.msg);
    } else if (strcmp(word, "counters") == 0)
        counters();
    else if (strncmp(word, "eval=", 5) == 0)
        eval(word, (uint32_t)atoi(word + 5), (uint32_t)atoi(word + 5));
    else if (strncmp(word, "step=", 5) == 0)
        eval(word, (uint32_t)atoi(word + 5), 1);
    else if (strncmp(word, "gen=", 4) == 0)
        generate((uint32_t)atoi(word + 4));
    else if (strncmp(word, "swap=", 5) == 0) {
        int rc = cb_swap(engine, word + 5, &err);
        say("swap", rc, &err);
    } else
        printf("%s: no such action\n", word);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static char out[1 << 16];
    setvbuf(stdout, out, _IOFBF, sizeof out); /* no allocation between the counts */
    (void)count_lines("/proc/self/maps");
    long fds = count_fds(), maps = count_lines("/proc/self/maps");
    for (int i = 1; i < argc; i++)
        act(argv[i]);
    cb_engine_close(engine);
    printf("left fds=%ld maps=%ld\n", count_fds() - fds, count_lines("/proc/self/maps") - maps);
    return 0;
}
