/* store_plan.c — how many slots fit, and where they lie (store.h). */
#include "expert/store.h"

#include "model/layout.h"

static int is_mapped_mode(const struct cb_options *opt)
{
    return opt->weights == CB_WEIGHTS_MMAP || opt->weights == CB_WEIGHTS_LAZY;
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

uint32_t cb_store_slots(const struct cb_files *f, const struct cb_options *opt, uint64_t room,
                        uint32_t *least, uint64_t *slot_bytes)
{
    const struct cb_manifest *m = f->m;
    uint64_t n = (uint64_t)cb_manifest_moe_layers(m) * m->n_expert, largest = 0;
    for (uint64_t i = 0; i < n; i++)
        if (f->record[i].size > largest)
            largest = f->record[i].size;
    *slot_bytes = round_up(largest, cb_os_page());
    *least = 0;
    if (n == 0 || is_mapped_mode(opt))
        return 0;
    uint32_t used = m->n_used + (opt->extra_expert != 0);
    *least = used < n ? used : (uint32_t)n;
    uint64_t fit = room / *slot_bytes;
    if (opt->weights == CB_WEIGHTS_PRELOAD)
        return fit >= n ? (uint32_t)n : 0;
    if (opt->cache_none)
        fit = fit < *least ? fit : *least;
    else if (opt->cache_experts != 0 && opt->cache_experts < fit)
        fit = opt->cache_experts > *least ? opt->cache_experts : *least;
    if (fit > n)
        fit = n;
    return fit < *least ? 0 : (uint32_t)fit;
}

/* Memory of the mapped modes: tables only, the blocks are the files' own. */
static int layout_mapped(struct cb_store *s, struct cb_arena *a, const struct cb_files *f,
                         const struct cb_options *opt, struct cb_err *err)
{
    struct cb_mapped *m = &s->mapped;
    m->lazy = opt->weights == CB_WEIGHTS_LAZY;
    m->n_shard = f->m->n_shard;
    m->block_bytes = (uint64_t)(opt->lazy_block_mib != 0 ? opt->lazy_block_mib : 16) << 20;
    if (m->block_bytes > (64u << 20))
        return cb_fail(err, CB_EINVAL, "lazy blocks have at most 64 MiB, not %u",
                       opt->lazy_block_mib);
    uint64_t blocks = 0, whole = 0;
    for (uint32_t i = 0; i < m->n_shard; i++) {
        blocks += (f->shard_file[i].size + m->block_bytes - 1) / m->block_bytes;
        whole += round_up(f->shard_file[i].size, cb_os_page());
    }
    m->n_block = (uint32_t)blocks;
    m->limit = m->n_block;
    uint64_t mapped = whole; /* bytes in memory at once; short shards do not fill their block */
    if (m->lazy && opt->lazy_limit_bytes != 0 && whole > opt->lazy_limit_bytes) {
        uint64_t fit = opt->lazy_limit_bytes / m->block_bytes;
        /* One thread can touch two blocks at once (a part that crosses a border); with
         * fewer, threads would take them from each other for ever. Count these: the
         * check refuses with the sum. */
        uint64_t least = 2u * (uint64_t)opt->threads + 2u;
        if (fit < least)
            fit = least;
        if (fit < m->limit)
            m->limit = (uint32_t)fit;
        if ((uint64_t)m->limit * m->block_bytes < whole)
            mapped = (uint64_t)m->limit * m->block_bytes;
    }
    m->shard = cb_arena_take(a, CB_L_EXPERTS, m->n_shard, sizeof *m->shard);
    m->ring = cb_arena_take(a, CB_L_EXPERTS, m->limit, sizeof *m->ring);
    m->is_mapped = cb_arena_take(a, CB_L_EXPERTS, m->n_block, sizeof *m->is_mapped);
    if (m->lazy) /* mapped blocks are bounded, so they stand in the ledger */
        a->line[CB_L_EXPERTS] += mapped;
    return 0;
}

int cb_store_layout(struct cb_store *s, struct cb_arena *a, const struct cb_files *f,
                    const struct cb_options *opt, uint32_t n_slot, uint64_t slot_bytes,
                    struct cb_err *err)
{
    const struct cb_manifest *m = f->m;
    s->mode = (enum cb_weights)opt->weights;
    s->policy = (enum cb_cache_policy)opt->cache_policy;
    s->n_layer = cb_manifest_moe_layers(m);
    s->n_expert = m->n_expert;
    s->n_embd = m->n_embd;
    s->n_ff = m->n_expert_ff;
    s->first_layer = m->n_dense_layer;
    s->n_shard = m->n_shard;
    s->n_slot = n_slot;
    s->slot_bytes = slot_bytes;
    uint32_t want = m->n_used + 1 + (opt->extra_expert != 0);
    uint32_t even = s->n_layer > 0 ? n_slot / s->n_layer : 0;
    s->floor = even < want ? even : want;
    uint64_t n = (uint64_t)s->n_layer * s->n_expert;
    s->record = cb_arena_take(a, CB_L_EXPERTS, n, sizeof *s->record);
    s->spare = opt->hot_swap ? cb_arena_take(a, CB_L_EXPERTS, n, sizeof *s->spare) : NULL;
    s->file = cb_arena_take(a, CB_L_EXPERTS, s->n_shard, sizeof *s->file);
    s->resident = cb_arena_take(a, CB_L_EXPERTS, s->n_layer, sizeof *s->resident);
    s->want = cb_arena_take(a, CB_L_EXPERTS, s->n_expert, sizeof *s->want);
    s->slot = cb_arena_take(a, CB_L_EXPERTS, n_slot, sizeof *s->slot);
    s->queue = cb_arena_take(a, CB_L_EXPERTS, n_slot, sizeof *s->queue);
    if (s->n_layer > 0 && is_mapped_mode(opt))
        return layout_mapped(s, a, f, opt, err);
    if (n_slot == 0)
        return 0;
    /* A guard page on either side: a kernel that runs off its matrix faults. */
    uint64_t page = cb_os_page();
    s->guard[0] = cb_arena_take_pages(a, CB_L_EXPERTS, page, page);
    uint8_t *data = cb_arena_take_pages(a, CB_L_EXPERTS, (uint64_t)n_slot * slot_bytes, page);
    s->guard[1] = cb_arena_take_pages(a, CB_L_EXPERTS, page, page);
    for (uint32_t i = 0; s->slot != NULL && data != NULL && i < n_slot; i++)
        s->slot[i].data = data + (uint64_t)i * slot_bytes;
    return 0;
}
