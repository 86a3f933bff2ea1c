/* colibri.h — the one public header of the colibri engine.
 *
 * An engine is one loaded model inside one memory budget; it holds one session
 * (one KV cache, one position). Everything is mapped and touched in
 * cb_engine_open(); no call after it allocates.
 *
 * Every fallible function returns 0 or a negative CB_E… and fills the caller's
 * struct cb_err. Nothing here prints or exits. Sizes are bytes unless the name
 * says otherwise; times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CB_VERSION "0.1.0"
#define CB_ABI 5u /* raised whenever a struct below changes */

enum cb_code {
    CB_OK = 0,
    CB_EINVAL = -1,    /* an argument or option is wrong */
    CB_EIO = -2,       /* the operating system refused a read, write or map */
    CB_EFORMAT = -3,   /* the model files are malformed, swapped or damaged */
    CB_EBUDGET = -4,   /* the plan does not fit the memory budget */
    CB_EGOLDEN = -5,   /* the golden does not match: wrong bits, do not serve */
    CB_ENUMERIC = -6,  /* NaN or infinity where a number must be */
    CB_EUTF8 = -7,     /* the prompt is not UTF-8 */
    CB_ECONTEXT = -8,  /* more tokens than the context holds */
    CB_EUNSUPPORTED = -9, /* a type, feature or ISA this build does not have */
    CB_ECANCEL = -10,  /* the caller's callback asked to stop */
    CB_EEXPERT = -11   /* an expert is unhealthy: CRC, I/O error or fault; the message names it */
};

struct cb_err {
    int code;
    char msg[256];
};

/* Sets *err (may be NULL) and returns code, so `return cb_fail(err, …)` works. */
int cb_fail(struct cb_err *err, int code, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
const char *cb_code_name(int code); /* "CB_EFORMAT" … */

/* ---- options ----------------------------------------------------------- */

enum cb_kv_type { CB_KV_F16 = 0, CB_KV_F32 = 1, CB_KV_Q8_0 = 2 };

#define CB_SEQ_MAX 64u

/* Where expert weights live (docs/memory.md). */
enum cb_weights {
    CB_WEIGHTS_ARENA = 0,   /* fixed slots in the arena, read by the engine; a hit is a pointer */
    CB_WEIGHTS_MMAP = 1,    /* the files mapped as they are; the kernel's page cache decides */
    CB_WEIGHTS_LAZY = 2,    /* reserved addresses; a fault maps a block, the oldest is unmapped */
    CB_WEIGHTS_PRELOAD = 3  /* all of them read at start */
};
enum cb_cache_policy { CB_CACHE_SLRU = 0, CB_CACHE_LRU = 1, CB_CACHE_LFU = 2 };
enum cb_on_bad { CB_BAD_FAIL = 0, CB_BAD_NEXT = 1 };
enum cb_on_miss { CB_MISS_WAIT = 0, CB_MISS_ZEROS = 1 };

/* Called from the watchdog thread when one token takes longer than its
 * deadline: the layer, the expert being waited for or computed (-1 = none) and
 * the milliseconds so far. Once per token. */
typedef void (*cb_stuck_fn)(void *ud, uint32_t layer, int32_t expert, uint64_t ms);

/* All zero (but for model_dir) is the default. */
struct cb_options {
    const char *model_dir;   /* NAME.coli/ */
    uint64_t budget;         /* bytes; 0 = the smaller of MemAvailable and every cgroup limit */
    uint32_t ctx;            /* context length in tokens; 0 = min(the model's, 4096) */
    uint32_t batch;          /* prefill chunk in tokens; 0 = 32 */
    uint32_t threads;        /* 0 = physical cores */
    uint32_t sequences;      /* KV caches, 1 to CB_SEQ_MAX; 0 = 1 */
    uint32_t kv_type;        /* enum cb_kv_type */
    uint32_t lock;           /* 1 = mlock the arena */
    uint32_t over_budget;    /* 1 = go on although the plan exceeds what is available */
    const char *isa;         /* NULL = best; else "scalar", "sse41", "avx2", "neon" */

    uint32_t weights;        /* enum cb_weights */
    uint32_t cache_experts;  /* slots at most; 0 = as many as the budget holds */
    uint32_t cache_none;     /* 1 = keep only the experts in use: one token's worth of slots */
    uint32_t cache_policy;   /* enum cb_cache_policy */
    uint32_t readers;        /* reader threads; 0 = 2 */
    uint32_t buffered;       /* 1 = never O_DIRECT */
    uint32_t no_lookahead;   /* 1 = no speculative reads */
    uint32_t on_bad;         /* enum cb_on_bad */
    uint32_t on_miss;        /* enum cb_on_miss: zeros is lossy */
    uint32_t extra_expert;   /* 1 = one more expert when the top router logit is below extra_below */
    float extra_below;
    uint32_t hot_swap;       /* 1 = room for a second set of dense weights: cb_swap() works */
    uint32_t lazy_block_mib; /* block of CB_WEIGHTS_LAZY, 1 to 64; 0 = 16 */
    uint64_t lazy_limit_bytes; /* mapped at once; set from the budget, not by callers */
    uint32_t token_deadline_ms; /* 0 = no watchdog */
    cb_stuck_fn on_stuck;
    void *stuck_ud;
    const char *offload;     /* a link to a module that computes experts (docs/offload.md): /dev/…,
                              * unix:PATH, tcp:ADDRESS:PORT; NULL = none. Never changes bits */
    uint32_t offload_force;  /* for tests: 1 + percent of the experts that go; 0 = the cost model */
    uint32_t offload_deadline_ms; /* a layer waits this long for the module; 0 = from measurements */
    const char *pin_file;    /* experts to keep always: text lines "layer expert"; NULL = none */
    /* Test hook: called before a reader's pread of n bytes at offset of shard;
     * non-zero = an errno to fail with. It may sleep. NULL in use. */
    int (*io_hook)(void *ud, uint32_t shard, uint64_t offset, uint64_t n);
    void *io_ud;
};
/* ---- memory ledger ----------------------------------------------------- */

enum cb_ledger_line {
    CB_L_DENSE, CB_L_EXPERTS, CB_L_KV, CB_L_ACT, CB_L_TOKENIZER, CB_L_STACKS,
    CB_L_SERVER, CB_L_RUNTIME, CB_L_COUNT
};
struct cb_ledger {
    uint64_t bytes[CB_L_COUNT];
    uint64_t total;
    uint64_t budget;        /* what was asked for */
    uint64_t available;     /* what the machine has now */
    uint32_t slots;         /* expert slots planned */
    uint32_t records;       /* experts of the model */
    uint64_t slot_bytes;    /* bytes a slot */
};
const char *cb_ledger_name(int line); /* "dense weights" … */

/* ---- the engine -------------------------------------------------------- */

struct cb_engine;

struct cb_info {
    char name[64];
    char arch[32];
    char isa[16];
    char model_id[33];       /* hex of the 16-byte model id in every file's header */
    char golden[65];         /* hex sha256 the manifest promises, "" if none */
    uint32_t n_layer, n_embd, n_head, n_head_kv, head_dim, n_vocab;
    uint32_t n_ff, n_expert, n_expert_used, n_expert_ff, n_moe_layer;
    uint32_t ctx, ctx_train, batch, threads;
    uint32_t experts_loaded; /* expert records in memory */
    uint32_t bos, eos;       /* token ids; UINT32_MAX = none */
    uint32_t add_bos;
};

/* The plan alone: reads the manifest and the headers, allocates nothing that
 * stays. Fills *ledger even when it returns CB_EBUDGET. */
int cb_plan(const struct cb_options *opt, struct cb_ledger *ledger,
            struct cb_info *info, struct cb_err *err);

int cb_engine_open(const struct cb_options *opt, struct cb_engine **out,
                   struct cb_err *err);
void cb_engine_close(struct cb_engine *e); /* NULL is fine */
void cb_engine_info(const struct cb_engine *e, struct cb_info *info);
void cb_engine_ledger(const struct cb_engine *e, struct cb_ledger *ledger);

/* ---- tokens in, logits out --------------------------------------------- */

void cb_reset(struct cb_engine *e);            /* position 0, counters kept */
uint32_t cb_position(const struct cb_engine *e);

/* Runs n tokens (chunks of at most opt.batch) and leaves the last token's
 * logits in cb_logits(). With all != NULL also writes every token's logits,
 * float [n][n_vocab]. With experts != NULL writes the chosen experts in rank
 * order, int32 [n_moe_layer][n][n_expert_used]. The bits do not depend on how
 * the tokens are split over calls or chunks. */
int cb_eval(struct cb_engine *e, const int32_t *tokens, uint32_t n, float *all,
            int32_t *experts, struct cb_err *err);
const float *cb_logits(const struct cb_engine *e); /* [n_vocab] */

/* ---- several sequences --------------------------------------------------- *
 *
 * An engine opened with opt.sequences = N holds N independent KV caches.
 * cb_eval, cb_reset, cb_position, cb_logits and cb_generate are about sequence
 * 0. cb_run runs a step of several sequences as one batch, so that they share
 * expert loads; each gives the bits that it would give alone. */
struct cb_step {
    uint32_t seq;
    const int32_t *tokens;   /* [n] */
    uint32_t n;              /* 1 in decode; a piece of the prompt in prefill */
    const float *logits;     /* out: [n_vocab] after the last token, valid until the next call */
    uint64_t degraded, zeros, extra; /* out: as in cb_counters, of these tokens alone */
};
/* The steps' n together are at most opt.batch; a sequence stands in one step
 * at most; n_step <= opt.sequences. On an error no position moves. */
int cb_run(struct cb_engine *e, struct cb_step *step, uint32_t n_step, struct cb_err *err);
void cb_seq_reset(struct cb_engine *e, uint32_t seq);
uint32_t cb_seq_position(const struct cb_engine *e, uint32_t seq);

/* sha256 (hex, 64 + NUL) of the little-endian logits [16][n_vocab] of the
 * fixed tokens t(i) = (i * 2654435761 + 12345) mod 2^32 mod n_vocab, from
 * position 0, KV in F16: 8 tokens as one prefill, then 8 single ones. Resets
 * the session before and after. */
int cb_golden(struct cb_engine *e, char hex[65], struct cb_err *err);

struct cb_counters {
    uint64_t tokens_prefill, tokens_decode;
    uint64_t ns_prefill, ns_decode;
    uint64_t routes, recomputed;     /* (layer, token) routings; margin certificate failures */
    uint64_t hits, misses;           /* expert look-ups, one per distinct expert, layer and chunk */
    uint64_t bytes_read, ns_wait;    /* by the readers; time that compute waited for them */
    uint64_t evictions;
    uint64_t ahead_issued, ahead_useful, ahead_wasted; /* look-ahead reads */
    uint64_t retries;                /* records read a second time after a bad CRC or an I/O error */
    uint64_t unhealthy;              /* experts marked so */
    uint64_t degraded;               /* (layer, token) routings that passed over an unhealthy expert */
    uint64_t zeros;                  /* (layer, token, rank) outputs left out by on_miss = zeros */
    uint64_t extra;                  /* (layer, token) routings with one more expert */
    uint64_t swaps;                  /* models taken over by cb_swap */
    uint64_t stuck;                  /* tokens over their deadline */
    /* The offload link; an expert counts once a layer and chunk. */
    uint64_t offload_experts;        /* computed at the other end */
    uint64_t offload_bytes_out, offload_bytes_in;
    uint64_t ns_offload_wait;        /* after all else of the layer was done */
    uint64_t offload_connects;       /* greetings that succeeded */
    uint64_t offload_local;          /* sent away, computed here after all */
    uint64_t offload_late;           /* layers whose deadline passed */
    uint64_t offload_dropped;        /* results that came after it */
    uint64_t offload_cut;            /* connections that ended or went silent */
    uint64_t offload_crc;            /* frames dropped for their CRC */
    uint64_t offload_garbage;        /* runs of bytes between frames */
    uint64_t offload_gaps;           /* frames missing in the module's sequence */
    uint64_t offload_refused;        /* modules with another model, golden, geometry or protocol */
    uint64_t offload_errors;         /* ERROR frames, and frames without sense */
    uint64_t offload_wrong;          /* trials that gave other bits */
};
void cb_engine_counters(const struct cb_engine *e, struct cb_counters *c);

/* How the offload link is. Averages; 0 = not measured. */
struct cb_offload_info {
    char state[12];          /* "off", "down", "up", "demoted": not asked for a while */
    char why[160];           /* the last trouble, "" = none */
    char who[40];            /* what the module says it is */
    uint64_t latency_ns;     /* a small frame there and one back */
    uint64_t bytes_s;
    uint64_t expert_here_ns, expert_there_ns; /* one expert, one row */
};
void cb_engine_offload(const struct cb_engine *e, struct cb_offload_info *info);

/* Takes over another folder with the same geometry (a new release of the
 * weights) at a token boundary. The new golden is checked first; on any error
 * the old model stays. All sequences are at position 0 after it, except when the
 * folder could not even be read: then nothing has changed. Needs opt.hot_swap. */
int cb_swap(struct cb_engine *e, const char *model_dir, struct cb_err *err);

/* Routing latency of the last cb_eval: ns per MoE layer (router product +
 * top-k, whole batch), float weights of the chosen experts of the last token.
 * Pointers stay valid until the next cb_eval. */
const uint64_t *cb_route_ns(const struct cb_engine *e);       /* [n_moe_layer] */
const int32_t *cb_last_experts(const struct cb_engine *e);    /* [n_moe_layer][n_expert_used] */
const float *cb_last_weights(const struct cb_engine *e);      /* [n_moe_layer][n_expert_used] */

/* ---- text -------------------------------------------------------------- */

/* Encodes n bytes of UTF-8. Special tokens in the text become their ids when
 * special is set. Returns the number of ids or a negative code (CB_EUTF8 names
 * the byte offset when strict; CB_ECONTEXT when cap is too small). */
int cb_encode(const struct cb_engine *e, const char *text, size_t n, int special,
              int strict_utf8, int32_t *ids, size_t cap, struct cb_err *err);
/* Bytes of one token; not NUL-terminated, may be part of a UTF-8 sequence.
 * Control tokens have length 0 unless special is set. */
const char *cb_token_bytes(const struct cb_engine *e, int32_t id, int special, size_t *len);
int cb_is_eog(const struct cb_engine *e, int32_t id); /* ends a generation */

/* ---- generation -------------------------------------------------------- */

struct cb_sampling {
    float temperature;       /* <= 0: greedy */
    uint32_t top_k;          /* 0 = all */
    float top_p;             /* 1 = all */
    float min_p;             /* 0 = all */
    float repeat_penalty;    /* 1 = none */
    uint32_t repeat_last_n;  /* tokens looked back on; at most 1024 */
    uint64_t seed;
};
void cb_sampling_default(struct cb_sampling *s);

/* Picks a token from logits[n_vocab]; counter n makes the draw a pure function
 * of (seed, n). recent[n_recent] feeds the repetition penalty. scratch is
 * engine-owned. */
int cb_sample(struct cb_engine *e, const float *logits, const struct cb_sampling *s,
              uint64_t n, const int32_t *recent, uint32_t n_recent, int32_t *id,
              struct cb_err *err);

#define CB_STOP_MAX 4
#define CB_STOP_LEN 64
enum cb_finish { CB_FINISH_LENGTH, CB_FINISH_EOG, CB_FINISH_STOP, CB_FINISH_CANCEL, CB_FINISH_CONTEXT };

struct cb_gen_result {
    uint32_t n_prompt, n_gen;
    int finish;              /* enum cb_finish */
    uint64_t ns_first;       /* call to first token sampled */
    uint64_t ns_total;
    uint64_t degraded, zeros, extra; /* what changed the output; see struct cb_counters */
};
/* text[len] is whole UTF-8 sequences (bytes that never complete come out as
 * they are at the end); len may be 0. Return non-zero to stop. */
typedef int (*cb_text_fn)(void *ud, const char *text, size_t len, int32_t id);

int cb_generate(struct cb_engine *e, const int32_t *prompt, uint32_t n_prompt,
                uint32_t max_new, const struct cb_sampling *s,
                const char *const *stop, uint32_t n_stop, cb_text_fn fn, void *ud,
                struct cb_gen_result *res, struct cb_err *err);

/* ---- build facts ------------------------------------------------------- */

uint32_t cb_abi(void);                      /* CB_ABI of the library */
size_t cb_sizeof(const char *struct_name);  /* "cb_options" …; 0 = unknown: guards FFI callers */
const char *cb_isa_list(void);              /* "scalar,sse41,avx2": built in, strongest last */
const char *cb_isa_best(void);              /* strongest that this CPU runs */

#ifdef __cplusplus
}
#endif
#endif
