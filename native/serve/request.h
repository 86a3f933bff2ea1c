/* request.h — one request for tokens: what was asked, and the answer as it grows.
 *
 * Slots are made at start. The HTTP thread fills one and puts it into the
 * queue; the worker computes; the HTTP thread writes the answer out and frees
 * the slot. "shared" fields are touched under the server's lock only; "answer"
 * arrays are written by the worker and may be read up to the shared counts. */
#ifndef CB_SERVE_REQUEST_H
#define CB_SERVE_REQUEST_H

#include "colibri.h"
#include "core/emit.h"
#include "text/text.h"

#define CB_TOP_MAX 20u   /* top_logprobs of a token */
#define CB_TOP_ROOM 5u   /* such pairs kept a token of context, on average */

enum cb_req_state {
    CB_REQ_FREE,
    CB_REQ_FILLING, /* the HTTP thread's */
    CB_REQ_QUEUED,
    CB_REQ_PREFILL,
    CB_REQ_DECODE,
    CB_REQ_DONE
};

/* Why a request got no answer, as the client is told. */
struct cb_refusal {
    int status;       /* HTTP; 0 = none */
    const char *type; /* "invalid_request_error" … */
    const char *code; /* NULL = null */
    char param[32];   /* "" = null */
    char msg[256];
};

struct cb_tok {
    int32_t id;
    float logprob;
    uint32_t raw_end;  /* bytes of all tokens up to this one */
    uint32_t text_end; /* bytes that could be shown after it */
};
struct cb_top {
    int32_t id;
    float logprob;
};

struct cb_ask {
    int chat, stream, include_usage, logprobs;
    uint32_t top;              /* pairs a token */
    uint32_t max_new;
    int have_ids;              /* the prompt came as n_ids ids */
    uint32_t n_ids;
    uint32_t n_text;           /* bytes of prompt in text[] */
    struct cb_sampling sampling;
    uint32_t n_stop;
    char stop[CB_STOP_MAX][CB_STOP_LEN + 1];
    uint32_t release;          /* of the chat template that was used */
};

struct cb_req {
    struct cb_ask ask;         /* the HTTP thread's; constant once queued */
    uint64_t number;           /* order of arrival, and the name of the answer */
    uint64_t t_arrive, t_deadline;
    uint64_t created;          /* seconds since 1970 */
    int orphan;                /* the HTTP thread's: its client left */

    /* shared */
    enum cb_req_state state;
    int cancel;                /* nobody waits for it any more */
    int prepared;              /* the prompt is in ids[] and fits */
    uint32_t n_prompt, n_done; /* tokens of the prompt, those computed */
    uint32_t n_tok, n_text;    /* answer so far */
    int finish;                /* enum cb_finish, when DONE without refusal */
    struct cb_refusal refusal;
    uint64_t degraded, zeros, extra;
    uint64_t t_start, t_first, t_end;
    char model[64];            /* of the release that computes it, whatever comes after */
    char golden[65];
    const struct cb_text *words; /* its tokens, for logprobs; NULL = not needed */

    /* the worker's */
    uint32_t seq, w_tok, w_text, n_ids;
    uint32_t raw;              /* bytes of all tokens so far */
    int overflow;              /* text[] is full */
    uint32_t text_cap;         /* bytes of text[] */
    struct cb_emit emit;

    /* answer */
    int32_t *ids;              /* [ctx + 1] prompt, then answer */
    struct cb_tok *tok;        /* [ctx] */
    struct cb_top *tops;       /* [ctx * CB_TOP_ROOM]; token i's begin at i * ask.top */
    char *text;                /* [text_cap] first the prompt, then the answer */
};

#endif
