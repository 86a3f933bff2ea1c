/* cmd_expertd.c — `colibri expertd`: the module at the other end of an offload
 * link. It reproduces the golden before it answers anybody. */
#include <inttypes.h>
#include <string.h>

#include "cli.h"
#include "offload/module.h"
#include "sys.h"

#define EXPERTD_CTX 64u /* tokens: only the golden uses them */

static int stop(void *ud)
{
    (void)ud;
    return sys_interrupted();
}

static void say(void *ud, const char *what)
{
    (void)ud;
    fprintf(stderr, "expertd: %s\n", what);
}

static void report(const struct cli_args *a, const struct cb_module_stats *s)
{
    if (!a->json) {
        fprintf(stderr, "expertd: %" PRIu64 " connections, %" PRIu64 " refused, %" PRIu64
                        " layers, %" PRIu64 " rows, %" PRIu64 " failed, busy %.1f s\n",
                s->connections, s->refused, s->execs, s->rows, s->failed, (double)s->ns_busy / 1e9);
        return;
    }
    struct json j = {stdout, 0};
    json_begin(&j, NULL, '{');
    json_u64(&j, "connections", s->connections);
    json_u64(&j, "refused", s->refused);
    json_u64(&j, "execs", s->execs);
    json_u64(&j, "rows", s->rows);
    json_u64(&j, "failed", s->failed);
    json_u64(&j, "bytes_in", s->bytes_in);
    json_u64(&j, "bytes_out", s->bytes_out);
    json_u64(&j, "crc", s->crc);
    json_u64(&j, "garbage", s->garbage);
    json_u64(&j, "busy_ns", s->ns_busy);
    json_end(&j, '}');
    putchar('\n');
}

static int serve(const struct cli_args *a, struct cli_model *m, struct cb_module_options *o,
                 struct cb_err *err)
{
    struct cb_engine *e = NULL;
    struct cb_module_stats stats;
    char hex[65];
    uint64_t ns = 0;
    int rc = cb_engine_open(&m->opt, &e, err);
    if (rc < 0)
        return rc;
    cli_print_start(stderr, e, m);
    rc = cli_golden(e, hex, &ns, err);
    if (rc == CB_OK) {
        sys_catch_interrupt();
        fprintf(stderr, "golden ok %.12s… (%.2f s)\n", hex, (double)ns / 1e9);
        rc = cb_module_serve(e, o, &stats, err);
    }
    if (rc == CB_OK)
        report(a, &stats);
    cb_engine_close(e);
    return rc;
}

int verb_expertd(int argc, char **argv)
{
    struct cli_args a;
    struct cli_model m;
    struct cb_module_options o;
    struct cb_err err = {0, ""};
    int status = EXIT_OK, once = 0;
    memset(&o, 0, sizeof o);
    o.stop = stop;
    o.note = say;
    const struct arg rows[] = {
        {.group = "Link", .name = "--device", .kind = ARG_TEXT, .out = &o.device, .meta = "TTY",
         .help = "a serial device: /dev/ttyGS0, /dev/ttyACM0, tty:/dev/ttyS1@921600"},
        {.name = "--listen", .kind = ARG_TEXT, .out = &o.listen, .meta = "LINK",
         .help = "unix:PATH or tcp:ADDRESS:PORT (loopback or a private network)"},
        {.name = "--once", .kind = ARG_FLAG, .out = &once, .flag_value = 1,
         .help = "end when the first board goes"},
    };
    cli_args_begin(&a, "expertd", "Computes experts for a board at the other end of a link: run --offload there.\n"
                                  "Protocol: docs/offload.md. Ends on Ctrl-C or SIGTERM.");
    cli_args_add(&a, rows, sizeof rows / sizeof rows[0]);
    cli_model_args(&a, &m);
    if (cli_args_finish(&a, argc, argv, &status))
        return status;
    o.once = (uint32_t)once;
    int rc = cli_model_check(&m, &err);
    if (rc == CB_OK && (o.device != NULL) + (o.listen != NULL) != 1)
        rc = cb_fail(&err, CB_EINVAL, "give either --device TTY or --listen LINK");
    if (rc == CB_OK && m.opt.offload != NULL)
        rc = cb_fail(&err, CB_EINVAL, "--offload: a module does not send work on");
    m.opt.ctx = m.opt.ctx != 0 ? m.opt.ctx : EXPERTD_CTX;
    if (rc == CB_OK)
        rc = serve(&a, &m, &o, &err);
    if (rc < 0)
        return cli_open_error(&a, &m, &err);
    return EXIT_OK; /* Ctrl-C is how it ends */
}
