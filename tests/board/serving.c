/* serving.c — the stand-in engine (tests/integration/standin.c) with a `serve` verb.
 *
 * `serve` reads the model as `check` does, says that it serves, and stays, as a server
 * does. With GREED bytes defined it takes that much memory first.
 */
#define main standin_main
#include "../integration/standin.c"
#undef main

#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "serve") == 0) {
        int poison = 0;
        if (argc > 2 && strcmp(argv[2], "--help") == 0) {
            puts("  --options FILE"); /* deploy asks for it */
            return 0;
        }
        uint64_t hash = model_hash(option(argc, argv, "--model"), &poison);
#ifdef GREED
        volatile char *hoard = malloc(GREED);
        for (size_t i = 0; hoard && i < GREED; i += 4096)
            hoard[i] = 1; /* volatile: the compiler may not leave it out */
#endif
        printf("serving %016llx\n", (unsigned long long)hash);
        fflush(stdout);
        for (;;)
            pause();
    }
    if (argc > 2 && strcmp(argv[1], "health") == 0)
        return strcmp(argv[2], "--help") == 0 ? 0 : 1; /* nobody answers */
    return standin_main(argc, argv);
}
