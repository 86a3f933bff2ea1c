/* metrics.h — figures for /metrics, /status and the page. */
#ifndef CB_SERVE_METRICS_H
#define CB_SERVE_METRICS_H

#include <stdint.h>

#define CB_HIST 14u
/* Upper bounds in seconds of the buckets but the last, which has none. */
struct cb_hist {
    uint64_t n[CB_HIST + 1u];
    uint64_t count, sum_ns;
};
void cb_hist_add(struct cb_hist *h, uint64_t ns);

#define CB_RECENT 16u
struct cb_recent {
    uint64_t number, t_end, total_ns, first_ns;
    uint32_t n_prompt, n_tok;
    int chat, stream, status;
    char finish[16];
};

enum cb_endpoint {
    CB_EP_COMPLETIONS, CB_EP_CHAT, CB_EP_MODELS, CB_EP_HEALTH, CB_EP_METRICS, CB_EP_STATUS,
    CB_EP_PAGE, CB_EP_OTHER, CB_EP_COUNT
};

struct cb_metrics {
    uint64_t answers[CB_EP_COUNT][6];  /* by hundreds of the status */
    uint64_t tokens_prompt, tokens_answer;
    uint64_t cancelled, queue_full, expired, unauthorised, bad_host, malformed, timeouts;
    uint64_t accepted, turned_away;    /* connections */
    uint64_t degraded_answers, zeros_answers, extra_answers, failed_experts;
    uint64_t swaps_refused;
    struct cb_hist queue, first, total; /* of requests */
    struct cb_hist token;               /* between two steps of decoding; the worker's, locked */
    struct cb_recent recent[CB_RECENT];
    uint32_t n_recent;                  /* ever; the ring's next is n_recent % CB_RECENT */
};

#endif
