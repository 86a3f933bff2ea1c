/* err.c — error messages and code names. */
#include <stdarg.h>
#include <stdio.h>

#include "colibri.h"

int cb_fail(struct cb_err *err, int code, const char *fmt, ...)
{
    if (err == NULL)
        return code;
    err->code = code;
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    return code;
}

const char *cb_code_name(int code)
{
    static const char *const names[] = {
        "CB_OK", "CB_EINVAL", "CB_EIO", "CB_EFORMAT", "CB_EBUDGET", "CB_EGOLDEN",
        "CB_ENUMERIC", "CB_EUTF8", "CB_ECONTEXT", "CB_EUNSUPPORTED", "CB_ECANCEL",
        "CB_EEXPERT",
    };
    int i = -code;
    if (i < 0 || i >= (int)(sizeof names / sizeof names[0]))
        return "CB_E?";
    return names[i];
}
