/* replay.c — runs a harness without libFuzzer: each file as it is, then N
 * variants of it. replay N FILE… ; the variants are the same every time. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES 8192u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static uint64_t state = 1;

static uint32_t draw(uint32_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((state >> 33) % (below > 0 ? below : 1));
}

/* A byte changed, a piece doubled, or a piece left out. */
static size_t vary(uint8_t *p, size_t n)
{
    static const uint8_t odd[] = {0, '\n', '\r', ' ', ':', '"', '\\', '{', '[', ',', 0x7f, 0x80, 0xff};
    size_t at = draw((uint32_t)n), len = 1 + draw(16);
    len = len < n - at ? len : n - at;
    switch (draw(4)) {
    case 0:
        p[at] = (uint8_t)draw(256);
        return n;
    case 1:
        p[at] = odd[draw(sizeof odd)];
        return n;
    case 2:
        if (n + len > MAX_BYTES)
            return n;
        memmove(p + at + len, p + at, n - at);
        return n + len;
    default:
        memmove(p + at, p + at + len, n - at - len);
        return n - len;
    }
}

static void run_file(const char *path, unsigned long variants)
{
    static uint8_t seed[MAX_BYTES], data[MAX_BYTES];
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        exit(2);
    }
    size_t n = fread(seed, 1, sizeof seed, f);
    fclose(f);
    LLVMFuzzerTestOneInput(seed, n);
    for (unsigned long i = 0; i < variants && n > 0; i++) {
        size_t len = n;
        memcpy(data, seed, n);
        for (uint32_t k = 1 + draw(6); k > 0 && len > 0; k--)
            len = vary(data, len);
        LLVMFuzzerTestOneInput(data, len);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    for (int i = 2; i < argc; i++)
        run_file(argv[i], strtoul(argv[1], NULL, 10));
    printf("%d files\n", argc - 2);
    return 0;
}
