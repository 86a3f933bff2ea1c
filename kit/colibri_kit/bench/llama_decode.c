/* Decodes fixed tokens one at a time with llama.cpp's mmap loader; prints one JSON object.
 *   llama_decode MODEL.gguf THREADS CTX WARM TOKENS
 * Token i is (i * 2654435761 + 12345) mod 2^32 mod n_vocab, as in the engine's golden. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "llama.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    int threads = atoi(argv[2]), ctx = atoi(argv[3]), warm = atoi(argv[4]), n = atoi(argv[5]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    mp.load_mode = LLAMA_LOAD_MODE_MMAP;
    mp.use_extra_bufts = false; /* repacked copies are not mapped: the limit would kill it */
    double start = now();
    struct llama_model *model = llama_model_load_from_file(argv[1], mp);
    if (model == NULL)
        return 1;
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t)ctx;
    cp.n_batch = cp.n_ubatch = 32;
    cp.n_threads = cp.n_threads_batch = threads;
    struct llama_context *c = llama_init_from_model(model, cp);
    if (c == NULL)
        return 1;
    double loaded = now(), from = loaded;
    uint32_t vocab = (uint32_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < warm + n; i++) {
        llama_token token = (llama_token)((uint32_t)((uint64_t)i * 2654435761u + 12345u) % vocab);
        if (i == warm)
            from = now();
        if (llama_decode(c, llama_batch_get_one(&token, 1)) != 0)
            return 1;
    }
    printf("{\"load_s\": %.3f, \"seconds\": %.6f, \"tokens\": %d}\n", loaded - start, now() - from, n);
    return 0;
}
