/* main.c — checkkern alone: [--isa NAME] [--kernel PART] [--seed N] [--bench].
 * Exit status 0 = all equal, 1 = a difference, 2 = usage. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkkern.h"

static void print_line(void *ud, const char *text)
{
    (void)ud;
    puts(text);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const char *isa = NULL, *kernel = NULL;
    uint64_t seed = 0;
    int bench = 0;
    for (int i = 1; i < argc; i++) {
        const int more = i + 1 < argc;
        if (strcmp(argv[i], "--isa") == 0 && more) {
            isa = argv[++i];
        } else if (strcmp(argv[i], "--kernel") == 0 && more) {
            kernel = argv[++i];
        } else if (strcmp(argv[i], "--seed") == 0 && more) {
            seed = strtoull(argv[++i], NULL, 0);
        } else if (strcmp(argv[i], "--bench") == 0) {
            bench = 1;
        } else {
            fprintf(stderr, "usage: checkkern [--isa NAME] [--kernel PART] [--seed N] [--bench]\n");
            return 2;
        }
    }
    const int failed = cb_checkkern(isa, kernel, bench, seed, print_line, NULL);
    if (failed < 0) {
        fprintf(stderr, "nothing matches\n");
        return 2;
    }
    printf("%s: %d failed\n", failed == 0 ? "ok" : "FAIL", failed);
    return failed == 0 ? 0 : 1;
}
