/* standin.c — a program with the engine's command line and no model inside.
 *
 * Deployment tests need an engine that starts in a millisecond, reads every file of
 * the model, and can be told to fail. `check` and `run` hash the model's bytes, so a
 * tampered or missing file changes what they say. Compiled with:
 *   -DNAME="a"      two engines with different bytes
 *   -DFAIL_CHECK    check says that the golden does not match
 *   -DSLOW          run writes a word every 50 ms until it is ended
 * A file `poison` in the model's manifest text makes check fail as well.
 */
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef NAME
#define NAME "a"
#endif

static const char *option(int argc, char **argv, const char *name)
{
    for (int i = 2; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return NULL;
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* FNV-1a over the names and bytes of the model's files; exits with 3 when one is missing. */
static uint64_t model_hash(const char *folder, int *poison)
{
    char path[4096], *names[256];
    int n = 0;
    uint64_t hash = 14695981039346656037u;
    DIR *dir = folder ? opendir(folder) : NULL;
    if (dir == NULL) {
        fprintf(stderr, "error: no model\n");
        exit(3);
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL && n < 256;)
        if (entry->d_name[0] != '.')
            names[n++] = strdup(entry->d_name);
    qsort(names, (size_t)n, sizeof *names, compare);
    for (int i = 0; i < n; i++) {
        static char buf[1 << 16];
        size_t got;
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        FILE *f = fopen(path, "rb");
        if (f == NULL) {
            fprintf(stderr, "error: cannot open %s\n", path);
            exit(3);
        }
        while ((got = fread(buf, 1, sizeof buf - 1, f)) > 0) {
            buf[got] = 0;
            if (strcmp(names[i], "manifest.json") == 0 && strstr(buf, "poison"))
                *poison = 1;
            for (size_t k = 0; k < got; k++)
                hash = (hash ^ (uint8_t)buf[k]) * 1099511628211u;
        }
        fclose(f);
    }
    return hash;
}

static int run(uint64_t hash)
{
    static char prompt[1 << 20];
    size_t n = fread(prompt, 1, sizeof prompt - 1, stdin);
    if (n == 0) {
        fprintf(stderr, "error: the prompt is empty\n");
        return 2;
    }
    fprintf(stderr, "stand-in " NAME " starts\n");
    printf("%.*s|%016llx\n", (int)n, prompt, (unsigned long long)hash);
    fflush(stdout);
#ifdef SLOW
    for (;;) {
        struct timespec pause = {0, 50000000};
        nanosleep(&pause, NULL);
        printf("word ");
        fflush(stdout);
    }
#endif
    return 0;
}

int main(int argc, char **argv)
{
    const char *verb = argc > 1 ? argv[1] : "";
    int poison = 0;
    if (strcmp(verb, "version") == 0) {
        printf("{\"version\": \"0-" NAME "\"}\n");
        return 0;
    }
    if (strcmp(verb, "plan") == 0) {
        const char *budget = option(argc, argv, "--budget");
        if (budget && strtoull(budget, NULL, 10) < 4096) {
            fprintf(stderr, "error: 4096 bytes needed\n");
            return 4;
        }
        return 0;
    }
    uint64_t hash = model_hash(option(argc, argv, "--model"), &poison);
    if (strcmp(verb, "check") == 0) {
#ifdef FAIL_CHECK
        poison = 1;
#endif
        if (poison) {
            fprintf(stderr, "error: golden mismatch\n");
            return 5;
        }
        printf("golden ok %016llx\n", (unsigned long long)hash);
        return 0;
    }
    return strcmp(verb, "run") == 0 ? run(hash) : 2;
}
