/* offload_win.c — Windows has no offload links yet: refused by name. */
#if defined(_WIN32)
#include <stdio.h>
#include <string.h>

#include "offload/module.h"
#include "offload/offload.h"

int cb_offload_check(const struct cb_options *opt, const struct cb_manifest *m, struct cb_err *err)
{
    (void)m;
    return opt->offload == NULL
               ? 0
               : cb_fail(err, CB_EUNSUPPORTED, "offload: not in the Windows build");
}

void cb_offload_layout(struct cb_offload **o, struct cb_arena *a, const struct cb_engine *e)
{
    (void)a, (void)e;
    *o = NULL;
}

int cb_offload_open(struct cb_engine *e, struct cb_err *err)
{
    (void)e, (void)err;
    return 0;
}

void cb_offload_close(struct cb_offload *o)
{
    (void)o;
}

void cb_offload_model_changed(struct cb_engine *e)
{
    (void)e;
}

void cb_offload_pause(struct cb_engine *e, int on)
{
    (void)e, (void)on;
}

void cb_offload_counters(struct cb_offload *o, struct cb_counters *to)
{
    (void)o, (void)to;
}

void cb_engine_offload(const struct cb_engine *e, struct cb_offload_info *info)
{
    (void)e;
    memset(info, 0, sizeof *info);
    snprintf(info->state, sizeof info->state, "off");
}

uint32_t cb_offload_send(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                         uint8_t *remote)
{
    (void)o, (void)c;
    memset(remote, 0, n);
    return 0;
}

uint32_t cb_offload_wait(struct cb_offload *o, const struct cb_chunk *c, uint32_t n,
                         uint8_t *remote)
{
    (void)o, (void)c;
    memset(remote, 0, n);
    return 0;
}

void cb_offload_cancel(struct cb_offload *o)
{
    (void)o;
}

void cb_offload_note_here(struct cb_offload *o, uint32_t rows, double ns)
{
    (void)o, (void)rows, (void)ns;
}

int cb_module_serve(struct cb_engine *e, const struct cb_module_options *opt,
                    struct cb_module_stats *stats, struct cb_err *err)
{
    (void)e, (void)opt, (void)stats;
    return cb_fail(err, CB_EUNSUPPORTED, "offload: not in the Windows build");
}
#else
typedef int cb_offload_win_is_empty_here;
#endif
