/* cache.c — which expert gives up its slot.
 *
 * Segmented LRU: a record comes in on probation and moves to the protected
 * segment (at most 4/5 of the slots) when it is looked up again; victims come
 * from probation first, oldest first, the less used of two equally old. LRU and
 * LFU are what their names say. Never a victim: a slot in use or being filled,
 * a pinned record, a record of the layer at work. A layer that is down to its
 * floor keeps what it has as long as another can give.
 *
 * A victim is found by a scan: thousands of slots cost microseconds, a read
 * costs milliseconds. */
#include "expert/store.h"

static uint32_t layer_of(const struct cb_store *s, uint32_t r)
{
    return r / s->n_expert;
}

/* Whether slot a goes before slot b. */
static int worse(const struct cb_store *s, const struct cb_slot *a, const struct cb_slot *b)
{
    uint32_t ua = s->record[a->record].uses, ub = s->record[b->record].uses;
    if (s->policy == CB_CACHE_LFU && ua != ub)
        return ua < ub;
    if (s->policy == CB_CACHE_SLRU && a->hot != b->hot)
        return a->hot < b->hot;
    if (a->used_at != b->used_at)
        return a->used_at < b->used_at;
    return ua < ub;
}

static uint32_t find_victim(const struct cb_store *s, int ahead)
{
    uint32_t best = CB_NO_SLOT, spare = CB_NO_SLOT; /* spare: only by breaking a floor */
    for (uint32_t i = 0; i < s->n_slot; i++) {
        const struct cb_slot *c = &s->slot[i];
        if (c->state == CB_SLOT_FREE)
            return i;
        if (c->state != CB_SLOT_READY || c->in_use > 0 || s->record[c->record].pinned ||
            s->record[c->record].wanted)
            continue;
        uint32_t layer = layer_of(s, c->record);
        /* A look-ahead may take only the tail of probation, nobody's floor. */
        if (ahead && (c->hot || layer == s->ahead_layer))
            continue;
        if (layer == s->want_layer && s->n_want > 0 && s->floor > 0)
            continue;
        uint32_t *to = s->resident[layer] > s->floor ? &best : &spare;
        if (*to == CB_NO_SLOT || worse(s, c, &s->slot[*to]))
            *to = i;
    }
    return best != CB_NO_SLOT || ahead ? best : spare;
}

/* As find_victim, but a layer that fills the whole cache by itself may evict its
 * own experts that are not wanted now. */
static uint32_t find_own_victim(const struct cb_store *s)
{
    uint32_t best = CB_NO_SLOT;
    for (uint32_t i = 0; i < s->n_slot; i++) {
        const struct cb_slot *c = &s->slot[i];
        if (c->state == CB_SLOT_READY && c->in_use == 0 && !s->record[c->record].pinned &&
            !s->record[c->record].wanted &&
            (best == CB_NO_SLOT || worse(s, c, &s->slot[best])))
            best = i;
    }
    return best;
}

void cb_cache_drop(struct cb_store *s, uint32_t slot)
{
    struct cb_slot *c = &s->slot[slot];
    if (c->state == CB_SLOT_FREE)
        return;
    s->record[c->record].slot = CB_NO_SLOT;
    s->resident[layer_of(s, c->record)]--;
    s->n_hot -= c->hot;
    if (c->ahead)
        s->counters->ahead_wasted++;
    c->hot = c->ahead = 0;
    c->state = CB_SLOT_FREE;
}

uint32_t cb_cache_claim(struct cb_store *s, uint32_t r, int ahead)
{
    uint32_t i = find_victim(s, ahead);
    if (i == CB_NO_SLOT && !ahead)
        i = find_own_victim(s);
    if (i == CB_NO_SLOT)
        return CB_NO_SLOT;
    struct cb_slot *c = &s->slot[i];
    if (c->state == CB_SLOT_READY)
        s->counters->evictions++;
    cb_cache_drop(s, i);
    c->state = CB_SLOT_LOADING;
    c->record = r;
    c->used_at = ++s->tick;
    c->ahead = ahead != 0;
    s->record[r].slot = i;
    s->resident[layer_of(s, r)]++;
    return i;
}

/* The coldest of the protected segment goes back on probation. */
static void demote(struct cb_store *s)
{
    struct cb_slot *cold = NULL;
    for (uint32_t i = 0; i < s->n_slot; i++) {
        struct cb_slot *c = &s->slot[i];
        if (c->state != CB_SLOT_FREE && c->hot && (cold == NULL || worse(s, c, cold)))
            cold = c;
    }
    if (cold != NULL) {
        cold->hot = 0;
        s->n_hot--;
    }
}

void cb_cache_touch(struct cb_store *s, uint32_t slot)
{
    struct cb_slot *c = &s->slot[slot];
    struct cb_record *r = &s->record[c->record];
    if (r->uses < UINT32_MAX)
        r->uses++;
    if (c->ahead) {
        c->ahead = 0;
        s->counters->ahead_useful++;
    } else if (!c->hot && s->policy == CB_CACHE_SLRU && r->uses > 1) {
        c->hot = 1;
        s->n_hot++;
        if (s->n_hot > s->n_slot - s->n_slot / 5)
            demote(s);
    }
    c->used_at = ++s->tick;
}
