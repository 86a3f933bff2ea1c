/* fault_win.c — Windows has no mapped weight modes and no guard: experts are
 * preloaded and checked, a fault ends the process. */
#if defined(_WIN32)
#include "expert/fault.h"

int cb_guard(cb_guarded_fn *fn, void *arg)
{
    fn(arg);
    return 0;
}

int cb_fault_install(struct cb_err *err)
{
    (void)err;
    return 0;
}

int cb_fault_add(struct cb_mapped *m, struct cb_err *err)
{
    (void)m;
    return cb_fail(err, CB_EUNSUPPORTED, "weights `mmap` and `lazy` do not exist on Windows");
}

void cb_fault_remove(struct cb_mapped *m)
{
    (void)m;
}

int cb_mapped_open(struct cb_mapped *m, const struct cb_os_file *file, struct cb_err *err)
{
    (void)file;
    return cb_fault_add(m, err);
}

void cb_mapped_close(struct cb_mapped *m)
{
    (void)m;
}
#else
typedef int cb_fault_win_is_empty_here;
#endif
