/* manifest.c — see manifest.h. */
#include "model/manifest.h"

#include <string.h>

#include "core/container.h"
#include "core/json.h"

/* One object of the document and where its errors go. */
struct reader {
    const struct cb_json *j;
    uint32_t obj;
    const char *where;
    struct cb_err *err;
};

static int get_u32(const struct reader *r, const char *key, uint32_t lo, uint32_t hi,
                   uint32_t *out)
{
    uint64_t v;
    uint32_t t = cb_json_get(r->j, r->obj, key);
    int rc = cb_json_u64(r->j, t, hi, key, &v, r->err);
    if (rc == 0 && v < lo)
        rc = cb_fail(r->err, CB_EFORMAT, "%s is %llu, less than %u", key, (unsigned long long)v,
                     lo);
    if (rc != 0) {
        struct cb_err inner = r->err != NULL ? *r->err : (struct cb_err){0, ""};
        return cb_fail(r->err, rc, "manifest.json: %s: %.200s", r->where, inner.msg);
    }
    *out = (uint32_t)v;
    return 0;
}

static int get_f64(const struct reader *r, const char *key, double lo, double hi, double *out)
{
    double v;
    int rc = cb_json_f64(r->j, cb_json_get(r->j, r->obj, key), key, &v, r->err);
    if (rc != 0 || !(v >= lo && v <= hi))
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: %s: %s is missing or out of range",
                       r->where, key);
    *out = v;
    return 0;
}

static int get_f32(const struct reader *r, const char *key, double lo, double hi, float *out)
{
    double v = 0;
    int rc = get_f64(r, key, lo, hi, &v);
    *out = (float)v;
    return rc;
}

/* A string that must be one of names[0..n): its index. */
static int get_choice(const struct reader *r, const char *key, const char *const *names, int n,
                      int *out)
{
    char s[32];
    int rc = cb_json_str(r->j, cb_json_get(r->j, r->obj, key), key, s, sizeof s, r->err);
    if (rc != 0)
        return cb_fail(r->err, rc, "manifest.json: %s: %s is missing or too long", r->where, key);
    for (int i = 0; i < n; i++)
        if (strcmp(s, names[i]) == 0) {
            *out = i;
            return 0;
        }
    return cb_fail(r->err, CB_EUNSUPPORTED,
                   "manifest.json: %s: %s is \"%s\", which this engine does not have", r->where,
                   key, s);
}

static int parse_geometry(const struct reader *r, struct cb_manifest *m)
{
    int rc = 0;
    if ((rc = get_u32(r, "n_layer", 1, CB_MAX_LAYER, &m->n_layer)) != 0 ||
        (rc = get_u32(r, "n_embd", 1, 1u << 20, &m->n_embd)) != 0 ||
        (rc = get_u32(r, "n_head", 1, 1024, &m->n_head)) != 0 ||
        (rc = get_u32(r, "n_head_kv", 1, 1024, &m->n_head_kv)) != 0 ||
        (rc = get_u32(r, "head_dim", 1, 4096, &m->head_dim)) != 0 ||
        (rc = get_u32(r, "n_vocab", 1, 1u << 24, &m->n_vocab)) != 0 ||
        (rc = get_u32(r, "n_ff", 0, 1u << 24, &m->n_ff)) != 0 ||
        (rc = get_u32(r, "n_expert", 0, CB_MAX_EXPERT, &m->n_expert)) != 0 ||
        (rc = get_u32(r, "n_expert_used", 0, CB_MAX_USED, &m->n_used)) != 0 ||
        (rc = get_u32(r, "n_expert_ff", 0, 1u << 24, &m->n_expert_ff)) != 0 ||
        (rc = get_u32(r, "n_shexp_ff", 0, 1u << 24, &m->n_shexp_ff)) != 0 ||
        (rc = get_u32(r, "n_dense_layer", 0, CB_MAX_LAYER, &m->n_dense_layer)) != 0 ||
        (rc = get_u32(r, "ctx_train", 1, 1u << 30, &m->ctx_train)) != 0 ||
        (rc = get_u32(r, "rope_dim", 0, 4096, &m->rope_dim)) != 0)
        return rc;
    if (m->n_head % m->n_head_kv != 0 || m->rope_dim > m->head_dim || m->rope_dim % 2 != 0 ||
        m->n_used > m->n_expert || (m->n_expert > 0 && (m->n_used == 0 || m->n_expert_ff == 0)) ||
        m->n_dense_layer > m->n_layer ||
        (m->n_ff == 0 && (m->n_expert == 0 || m->n_dense_layer > 0)))
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: geometry: the numbers do not agree "
                       "(%u heads over %u, rope %u of %u, %u of %u experts)", m->n_head,
                       m->n_head_kv, m->rope_dim, m->head_dim, m->n_used, m->n_expert);
    return 0;
}

static int check_feature_keys(const struct reader *r)
{
    static const char *const known[] = {
        "rope", "rope_base", "rope_scale", "norm_eps", "qk_norm", "router", "router_renorm",
        "embd_scale", "resid_scale", "attn_scale", "logit_scale", "window", "window_layers",
    };
    const struct cb_json *j = r->j;
    uint32_t k = r->obj + 1;
    for (uint32_t i = 0; i < j->tok[r->obj].size; i++, k = j->tok[k + 1].next) {
        size_t n = 0;
        while (n < sizeof known / sizeof known[0] &&
               !(strlen(known[n]) == j->tok[k].len &&
                 memcmp(known[n], j->text + j->tok[k].at, j->tok[k].len) == 0))
            n++;
        if (n == sizeof known / sizeof known[0])
            return cb_fail(r->err, CB_EUNSUPPORTED,
                           "manifest.json: the model needs feature \"%.*s\", which this engine "
                           "does not have", (int)(j->tok[k].len > 60 ? 60 : j->tok[k].len),
                           j->text + j->tok[k].at);
    }
    return 0;
}

/* "window": n and "window_layers": one letter a layer, w = windowed, f = full. */
static int parse_window(const struct reader *r, struct cb_manifest *m)
{
    char layers[CB_MAX_LAYER + 1];
    if (cb_json_get(r->j, r->obj, "window") == CB_JSON_NONE)
        return 0;
    int rc = get_u32(r, "window", 1, 1u << 30, &m->window);
    if (rc == 0)
        rc = cb_json_str(r->j, cb_json_get(r->j, r->obj, "window_layers"),
                         "manifest.json: window_layers", layers, sizeof layers, r->err);
    if (rc != 0)
        return rc;
    if (strlen(layers) != m->n_layer || strspn(layers, "wf") != m->n_layer)
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: window_layers needs %u letters w or f",
                       m->n_layer);
    for (uint32_t il = 0; il < m->n_layer; il++)
        m->windowed[il] = layers[il] == 'w';
    return 0;
}

static int parse_features(const struct reader *r, struct cb_manifest *m)
{
    static const char *const ropes[] = {"none", "norm", "neox"};
    static const char *const qks[] = {"none", "head", "row"};
    static const char *const routers[] = {"softmax", "softmax_topk"};
    int rope = 0, qk = 0, router = 0, rc = 0;
    if ((rc = check_feature_keys(r)) != 0 ||
        (rc = get_choice(r, "rope", ropes, 3, &rope)) != 0 ||
        (rc = get_choice(r, "qk_norm", qks, 3, &qk)) != 0 ||
        (rc = get_choice(r, "router", routers, 2, &router)) != 0 ||
        (rc = get_f64(r, "rope_base", 1.0, 1e12, &m->rope_base)) != 0 ||
        (rc = get_f64(r, "rope_scale", 1e-6, 1e6, &m->rope_scale)) != 0 ||
        (rc = get_f32(r, "norm_eps", 0.0, 1.0, &m->norm_eps)) != 0 ||
        (rc = get_f32(r, "embd_scale", -1e6, 1e6, &m->embd_scale)) != 0 ||
        (rc = get_f32(r, "resid_scale", -1e6, 1e6, &m->resid_scale)) != 0 ||
        (rc = get_f32(r, "attn_scale", -1e6, 1e6, &m->attn_scale)) != 0 ||
        (rc = get_f32(r, "logit_scale", 1e-6, 1e6, &m->logit_scale)) != 0)
        return rc;
    m->rope = (enum cb_rope)rope;
    m->qk_norm = (enum cb_qk_norm)qk;
    m->router = (enum cb_router_kind)router;
    if (m->rope != CB_ROPE_NONE && m->rope_dim == 0)
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: rope without rope_dim");
    if ((rc = parse_window(r, m)) != 0)
        return rc;
    return cb_json_bool(r->j, cb_json_get(r->j, r->obj, "router_renorm"),
                        "manifest.json: router_renorm", &m->router_renorm, r->err);
}

static int hex_bytes(const char *hex, uint8_t *out, size_t n)
{
    for (size_t i = 0; i < 2 * n; i++) {
        char c = hex[i];
        int v = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (v < 0)
            return -1;
        out[i / 2] = (uint8_t)(i % 2 ? out[i / 2] | v : v << 4);
    }
    return hex[2 * n] == '\0' ? 0 : -1;
}

static int parse_ids(const struct reader *r, struct cb_manifest *m)
{
    const struct cb_json *j = r->j;
    char hex[65];
    uint8_t digest[32];
    int rc;
    if ((rc = cb_json_str(j, cb_json_get(j, 0, "model_id"), "manifest.json: model_id", hex,
                          sizeof hex, r->err)) != 0)
        return rc;
    if (strlen(hex) != 32 || hex_bytes(hex, m->model_id, 16) != 0)
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: model_id is not 32 hex digits");
    m->golden[0] = '\0';
    uint32_t g = cb_json_get(j, 0, "golden");
    if (g == CB_JSON_NONE || cb_json_is(j, g, CB_JSON_NULL))
        return 0;
    if ((rc = cb_json_str(j, cb_json_get(j, g, "sha256"), "manifest.json: golden.sha256", hex,
                          sizeof hex, r->err)) != 0)
        return rc;
    if (strlen(hex) != 64 || hex_bytes(hex, digest, 32) != 0)
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: golden.sha256 is not 64 hex digits");
    memcpy(m->golden, hex, sizeof hex);
    return 0;
}

/* Counts experts-NNNN.coli in "files"; they must be numbered 0, 1, 2 … */
static int count_shards(const struct reader *r, struct cb_manifest *m)
{
    const struct cb_json *j = r->j;
    uint32_t files = cb_json_get(j, 0, "files");
    if (!cb_json_is(j, files, CB_JSON_ARRAY))
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: files is missing");
    uint32_t t = files + 1;
    m->n_shard = 0;
    for (uint32_t i = 0; i < j->tok[files].size; i++, t = j->tok[t].next) {
        char name[64];
        int rc = cb_json_str(j, cb_json_get(j, t, "name"), "manifest.json: files[].name", name,
                             sizeof name, r->err);
        if (rc != 0)
            return rc;
        m->n_shard += strncmp(name, "experts-", 8) == 0;
    }
    if ((m->n_shard == 0) != (cb_manifest_moe_layers(m) == 0))
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: %u expert files for %u MoE layers",
                       m->n_shard, cb_manifest_moe_layers(m));
    return 0;
}

/* Optional string member into a fixed buffer; absent = "". */
static int opt_str(const struct reader *r, uint32_t obj, const char *key, char *buf, size_t cap)
{
    uint32_t t = cb_json_get(r->j, obj, key);
    buf[0] = '\0';
    if (t == CB_JSON_NONE || cb_json_is(r->j, t, CB_JSON_NULL))
        return 0;
    return cb_json_str(r->j, t, "manifest.json: chat", buf, cap, r->err);
}

/* "trims": {"user": true, …}: absent = none. */
static int parse_trims(const struct reader *r, uint32_t chat, const char *const *roles, int *trims)
{
    uint32_t obj = cb_json_get(r->j, chat, "trims");
    if (obj == CB_JSON_NONE)
        return 0;
    if (!cb_json_is(r->j, obj, CB_JSON_OBJECT))
        return cb_fail(r->err, CB_EFORMAT, "manifest.json: chat.trims is no object");
    for (int i = 0; i < CB_ROLE_COUNT; i++) {
        uint32_t t = cb_json_get(r->j, obj, roles[i]);
        int rc = t == CB_JSON_NONE
                     ? 0
                     : cb_json_bool(r->j, t, "manifest.json: chat.trims", &trims[i], r->err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int parse_chat(const struct reader *r, struct cb_chat *c)
{
    static const char *const roles[CB_ROLE_COUNT] = {"system", "user", "assistant"};
    const struct cb_json *j = r->j;
    uint32_t chat = cb_json_get(j, 0, "chat");
    char kind[32];
    memset(c, 0, sizeof *c);
    if (!cb_json_is(j, chat, CB_JSON_OBJECT))
        return 0;
    int rc = opt_str(r, chat, "template", kind, sizeof kind);
    if (rc != 0 || strcmp(kind, "parts") != 0)
        return rc;
    uint32_t prefix = cb_json_get(j, chat, "prefix"), suffix = cb_json_get(j, chat, "suffix");
    for (int i = 0; i < CB_ROLE_COUNT; i++)
        if ((rc = opt_str(r, prefix, roles[i], c->prefix[i], CB_CHAT_PART)) != 0 ||
            (rc = opt_str(r, suffix, roles[i], c->suffix[i], CB_CHAT_PART)) != 0)
            return rc;
    if ((rc = opt_str(r, chat, "system_default", c->system_default, CB_CHAT_PART)) != 0 ||
        (rc = opt_str(r, chat, "first", c->first, CB_CHAT_PART)) != 0 ||
        (rc = opt_str(r, chat, "generation", c->generation, CB_CHAT_PART)) != 0 ||
        (rc = parse_trims(r, chat, roles, c->trims)) != 0)
        return rc;
    c->have = 1;
    return 0;
}

uint64_t cb_manifest_scratch(uint64_t n)
{
    /* Every value takes at least two bytes of text ("0,"). */
    return (n / 2 + 2) * sizeof(struct cb_json_tok);
}

int cb_manifest_parse(struct cb_manifest *m, const char *text, uint64_t n, void *scratch,
                      struct cb_err *err)
{
    struct cb_json j;
    uint64_t format;
    memset(m, 0, sizeof *m);
    int rc = cb_json_parse(&j, text, (size_t)n, scratch, (uint32_t)(n / 2 + 2), err);
    if (rc != 0) {
        struct cb_err inner = err != NULL ? *err : (struct cb_err){0, ""};
        return cb_fail(err, rc, "manifest.json: %.200s", inner.msg);
    }
    if ((rc = cb_json_u64(&j, cb_json_get(&j, 0, "format"), UINT32_MAX, "manifest.json: format",
                          &format, err)) != 0)
        return rc;
    if (format != CB_FORMAT_VERSION)
        return cb_fail(err, CB_EFORMAT,
                       "manifest.json: format %llu; this engine reads format %u",
                       (unsigned long long)format, CB_FORMAT_VERSION);
    struct reader top = {&j, 0, "top level", err};
    struct reader geo = {&j, cb_json_get(&j, 0, "geometry"), "geometry", err};
    struct reader fea = {&j, cb_json_get(&j, 0, "features"), "features", err};
    if (!cb_json_is(&j, geo.obj, CB_JSON_OBJECT) || !cb_json_is(&j, fea.obj, CB_JSON_OBJECT))
        return cb_fail(err, CB_EFORMAT, "manifest.json: geometry or features is missing");
    if ((rc = cb_json_str(&j, cb_json_get(&j, 0, "name"), "manifest.json: name", m->name,
                          sizeof m->name, err)) != 0 ||
        (rc = cb_json_str(&j, cb_json_get(&j, 0, "arch"), "manifest.json: arch", m->arch,
                          sizeof m->arch, err)) != 0 ||
        (rc = parse_geometry(&geo, m)) != 0 || (rc = parse_features(&fea, m)) != 0 ||
        (rc = parse_ids(&top, m)) != 0 || (rc = count_shards(&top, m)) != 0)
        return rc;
    return parse_chat(&top, &m->chat);
}

uint32_t cb_manifest_moe_layers(const struct cb_manifest *m)
{
    return m->n_expert == 0 ? 0 : m->n_layer - m->n_dense_layer;
}
