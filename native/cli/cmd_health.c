/* cmd_health.c — `colibri health`: asks a running service how it is, as a client
 * would: /health, and with --prompt one answer. For deploy, and for boards that
 * have no curl. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <string.h>

#include "cli.h"
#include "core/json.h"
#include "core/os.h"
#include "serve/access.h"
#include "serve/buf.h"
#if !defined(_WIN32)
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#endif

#define ANSWER_BYTES 65536u
#define BODY_BYTES 16384u
#define FINGERPRINT 12u /* characters of the golden in system_fingerprint, after fp_ */
#define TOKENS 512u

struct health {
    struct cli_args args;
    const char *listen, *unix_path, *token_file, *prompt;
    uint32_t n_tokens, timeout_s;
    uint64_t t_end;
    char token[CB_TOKEN_MAX + 1];
    char out[BODY_BYTES + 1024], body[BODY_BYTES], in[ANSWER_BYTES + 1];
    struct cb_json_tok tok[TOKENS];
    struct cb_json json; /* the body of the answer that came last */
    int http;            /* its status */
    char status[32], model[64], golden[65], text[4096], finish[16];
    double uptime_s;
    uint64_t n_answer;
};

#if !defined(_WIN32)
/* ---- one request -------------------------------------------------------- */

/* The name of the place that is asked, for messages. */
static const char *place(const struct health *h)
{
    return h->unix_path != NULL ? h->unix_path : h->listen;
}

static int wait_for(const struct health *h, int fd, short events, struct cb_err *err)
{
    uint64_t now = cb_os_now_ns();
    struct pollfd p = {fd, events, 0};
    int ms = now < h->t_end ? (int)((h->t_end - now) / 1000000 + 1) : 0;
    int n = poll(&p, 1, ms);
    if (n > 0)
        return CB_OK;
    return n == 0 ? cb_fail(err, CB_EIO, "%.100s did not answer within %u s", place(h), h->timeout_s)
                  : cb_fail(err, CB_EIO, "waiting for %.100s: %s", place(h), strerror(errno));
}

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un un;
};

/* Where a service listens on every address it is asked over loopback. */
static int find_address(const struct health *h, union address *to, socklen_t *n, struct cb_err *err)
{
    struct cb_address a;
    memset(to, 0, sizeof *to);
    if (h->unix_path != NULL) {
        size_t len = strlen(h->unix_path);
        if (len == 0 || len >= sizeof to->un.sun_path)
            return cb_fail(err, CB_EINVAL, "--unix: the path has %zu bytes, at most %zu", len,
                           sizeof to->un.sun_path - 1);
        to->un.sun_family = AF_UNIX;
        memcpy(to->un.sun_path, h->unix_path, len);
        *n = sizeof to->un;
        return CB_OK;
    }
    int rc = cb_address_parse(&a, h->listen, err);
    if (rc < 0)
        return rc;
    int every = 1;
    for (size_t i = 0; i < sizeof a.ip; i++)
        every &= a.ip[i] == 0;
    if (a.v6) {
        to->v6.sin6_family = AF_INET6;
        to->v6.sin6_port = htons(a.port);
        memcpy(&to->v6.sin6_addr, every ? in6addr_loopback.s6_addr : a.ip, 16);
        *n = sizeof to->v6;
        return CB_OK;
    }
    uint32_t loopback = htonl(INADDR_LOOPBACK);
    to->v4.sin_family = AF_INET;
    to->v4.sin_port = htons(a.port);
    memcpy(&to->v4.sin_addr, every ? (const void *)&loopback : a.ip, 4);
    *n = sizeof to->v4;
    return CB_OK;
}

static int open_connection(const struct health *h, int *fd, struct cb_err *err)
{
    union address to;
    socklen_t n = 0;
    int why = 0;
    socklen_t len = sizeof why;
    int rc = find_address(h, &to, &n, err);
    if (rc < 0)
        return rc;
    *fd = socket(to.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*fd < 0)
        return cb_fail(err, CB_EIO, "cannot make a socket: %s", strerror(errno));
    if (connect(*fd, &to.any, n) == 0)
        return CB_OK;
    why = errno;
    if (why == EINPROGRESS) {
        rc = wait_for(h, *fd, POLLOUT, err);
        if (rc == CB_OK)
            (void)getsockopt(*fd, SOL_SOCKET, SO_ERROR, &why, &len);
    }
    if (rc == CB_OK && why != 0)
        rc = cb_fail(err, CB_EIO, "nobody answers on %.100s: %s", place(h), strerror(why));
    if (rc < 0)
        close(*fd);
    return rc;
}

static int send_all(const struct health *h, int fd, const char *p, size_t n, struct cb_err *err)
{
    while (n > 0) {
        ssize_t done = send(fd, p, n, MSG_NOSIGNAL);
        if (done >= 0) {
            p += done;
            n -= (size_t)done;
            continue;
        }
        if (errno != EAGAIN && errno != EINTR)
            return cb_fail(err, CB_EIO, "%.100s: %s", place(h), strerror(errno));
        int rc = wait_for(h, fd, POLLOUT, err);
        if (rc < 0)
            return rc;
    }
    return CB_OK;
}

static int read_all(struct health *h, int fd, size_t *n, struct cb_err *err)
{
    for (*n = 0; *n < ANSWER_BYTES;) {
        ssize_t got = recv(fd, h->in + *n, ANSWER_BYTES - *n, 0);
        if (got == 0)
            return CB_OK;
        if (got > 0) {
            *n += (size_t)got;
            continue;
        }
        if (errno != EAGAIN && errno != EINTR)
            return cb_fail(err, CB_EIO, "%.100s: %s", place(h), strerror(errno));
        int rc = wait_for(h, fd, POLLIN, err);
        if (rc < 0)
            return rc;
    }
    return cb_fail(err, CB_EIO, "%.100s: an answer of more than %u bytes", place(h), ANSWER_BYTES);
}

/* The status and the JSON of what came. */
static int take_answer(struct health *h, size_t n, struct cb_err *err)
{
    h->in[n] = '\0';
    char *body = strstr(h->in, "\r\n\r\n");
    int digits = n > 12 && memcmp(h->in, "HTTP/1.", 7) == 0;
    for (int i = 9; i < 12 && digits; i++)
        digits = h->in[i] >= '0' && h->in[i] <= '9';
    if (!digits || body == NULL)
        return cb_fail(err, CB_EIO, "%.100s does not speak HTTP as a colibri service does", place(h));
    h->http = (h->in[9] - '0') * 100 + (h->in[10] - '0') * 10 + (h->in[11] - '0');
    body += 4;
    struct cb_err why = {0, ""};
    if (cb_json_parse(&h->json, body, n - (size_t)(body - h->in), h->tok, TOKENS, &why) < 0 ||
        !cb_json_is(&h->json, 0, CB_JSON_OBJECT))
        return cb_fail(err, CB_EIO, "%.100s answered with status %d and without JSON: it is no colibri "
                       "service", place(h), h->http);
    return CB_OK;
}

/* body NULL: GET. HTTP/1.0, so that the answer ends with the connection. */
static int ask(struct health *h, const char *path, const struct cb_buf *body, struct cb_err *err)
{
    struct cb_buf b = {h->out, 0, sizeof h->out, 0};
    size_t n = 0;
    int fd = -1;
    cb_buf_fmt(&b, "%s %s HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n",
               body != NULL ? "POST" : "GET", path);
    if (h->token[0] != '\0')
        cb_buf_fmt(&b, "Authorization: Bearer %s\r\n", h->token);
    if (body != NULL)
        cb_buf_fmt(&b, "Content-Type: application/json\r\nContent-Length: %zu\r\n", body->n);
    cb_buf_str(&b, "\r\n");
    if (body != NULL)
        cb_buf_add(&b, body->p, body->n);
    int rc = open_connection(h, &fd, err);
    if (rc < 0)
        return rc;
    rc = send_all(h, fd, b.p, b.n, err);
    if (rc == CB_OK)
        rc = read_all(h, fd, &n, err);
    close(fd);
    return rc == CB_OK ? take_answer(h, n, err) : rc;
}

/* ---- what is asked ------------------------------------------------------ */

/* A text member; what is not there or is no text leaves buf empty. */
static void take_text(const struct health *h, uint32_t obj, const char *key, char *buf, size_t cap)
{
    struct cb_err ignored;
    uint32_t t = cb_json_get(&h->json, obj, key);
    if (t == CB_JSON_NONE || !cb_json_is(&h->json, t, CB_JSON_STRING) ||
        cb_json_str(&h->json, t, key, buf, cap, &ignored) < 0)
        buf[0] = '\0';
}

static int ask_health(struct health *h, struct cb_err *err)
{
    struct cb_err ignored;
    int rc = ask(h, "/health", NULL, err);
    if (rc < 0)
        return rc;
    take_text(h, 0, "status", h->status, sizeof h->status);
    take_text(h, 0, "model", h->model, sizeof h->model);
    take_text(h, 0, "golden", h->golden, sizeof h->golden);
    uint32_t t = cb_json_get(&h->json, 0, "uptime_s");
    if (t == CB_JSON_NONE || cb_json_f64(&h->json, t, "uptime_s", &h->uptime_s, &ignored) < 0 ||
        h->golden[0] == '\0')
        return cb_fail(err, CB_EIO, "%.100s is no colibri service", place(h));
    if (h->http != 200)
        return cb_fail(err, CB_EIO, "the service on %.100s is not well: %s", place(h), h->status);
    return CB_OK;
}

static int refused(struct health *h, struct cb_err *err)
{
    char msg[160] = "";
    uint32_t e = cb_json_get(&h->json, 0, "error");
    if (e != CB_JSON_NONE && cb_json_is(&h->json, e, CB_JSON_OBJECT))
        take_text(h, e, "message", msg, sizeof msg);
    return cb_fail(err, CB_EIO, "%.60s refused the prompt with status %d: %s", place(h), h->http,
                   msg[0] != '\0' ? msg : "no reason given");
}

static int take_completion(struct health *h, struct cb_err *err)
{
    char mark[32];
    uint32_t usage = cb_json_get(&h->json, 0, "usage");
    uint32_t all = cb_json_get(&h->json, 0, "choices");
    take_text(h, 0, "system_fingerprint", mark, sizeof mark);
    if (all == CB_JSON_NONE || !cb_json_is(&h->json, all, CB_JSON_ARRAY) || h->tok[all].size != 1)
        return cb_fail(err, CB_EIO, "%.100s gave no answer to the prompt", place(h));
    if (strncmp(mark, "fp_", 3) != 0 || strncmp(mark + 3, h->golden, FINGERPRINT) != 0)
        return cb_fail(err, CB_EIO, "the answer is of %.20s, but /health said %.12s: the service changed "
                       "meanwhile", mark, h->golden);
    take_text(h, all + 1, "text", h->text, sizeof h->text);
    take_text(h, all + 1, "finish_reason", h->finish, sizeof h->finish);
    uint32_t t = usage != CB_JSON_NONE && cb_json_is(&h->json, usage, CB_JSON_OBJECT)
                     ? cb_json_get(&h->json, usage, "completion_tokens")
                     : CB_JSON_NONE;
    if (t == CB_JSON_NONE)
        return cb_fail(err, CB_EIO, "%.100s gave no count of tokens", place(h));
    return cb_json_u64(&h->json, t, UINT32_MAX, "completion_tokens", &h->n_answer, err);
}

static int ask_prompt(struct health *h, struct cb_err *err)
{
    struct cb_buf b = {h->body, 0, sizeof h->body, 0};
    cb_buf_str(&b, "{\"temperature\":0,\"prompt\":");
    cb_buf_quoted(&b, h->prompt);
    cb_buf_fmt(&b, ",\"max_tokens\":%u}", h->n_tokens);
    if (b.full)
        return cb_fail(err, CB_EINVAL, "--prompt is longer than %u bytes", BODY_BYTES / 6);
    int rc = ask(h, "/v1/completions", &b, err);
    if (rc < 0)
        return rc;
    return h->http == 200 ? take_completion(h, err) : refused(h, err);
}

/* The first token of the file: any of them opens the door. */
static int read_token(struct health *h, struct cb_err *err)
{
    char line[CB_TOKEN_MAX + 3];
    int begins = 1; /* a line, not the rest of one that is longer than any token */
    FILE *f = fopen(h->token_file, "r");
    if (f == NULL)
        return cb_fail(err, CB_EINVAL, "token file %.150s: %s", h->token_file, strerror(errno));
    while (h->token[0] == '\0' && fgets(line, sizeof line, f) != NULL) {
        size_t n = strcspn(line, "\r\n");
        int whole = line[n] != '\0', first = begins;
        line[n] = '\0';
        begins = whole;
        if (first && line[0] != '\0' && line[0] != '#')
            memcpy(h->token, line, strlen(line) < CB_TOKEN_MAX ? strlen(line) : CB_TOKEN_MAX);
    }
    fclose(f);
    return h->token[0] != '\0' ? CB_OK : cb_fail(err, CB_EINVAL, "%.180s holds no token", h->token_file);
}

static int check(struct health *h, struct cb_err *err)
{
    int rc = h->token_file != NULL ? read_token(h, err) : CB_OK;
    h->t_end = cb_os_now_ns() + h->timeout_s * UINT64_C(1000000000);
    if (rc == CB_OK)
        rc = ask_health(h, err);
    if (rc == CB_OK && h->prompt != NULL)
        rc = ask_prompt(h, err);
    return rc;
}
#else
static int check(struct health *h, struct cb_err *err)
{
    (void)h;
    return cb_fail(err, CB_EUNSUPPORTED, "health is not available on Windows, nor is serve");
}
#endif

static void report(const struct health *h)
{
    struct json j = {stdout, 0};
    if (!h->args.json) {
        printf("%s: %s, golden %s, up %.1f s\n", h->status, h->model, h->golden, h->uptime_s);
        if (h->prompt != NULL)
            printf("%s\n", h->text);
        return;
    }
    json_begin(&j, NULL, '{');
    json_word(&j, "status", h->status);
    json_word(&j, "model", h->model);
    json_word(&j, "golden", h->golden);
    json_float(&j, "uptime_s", h->uptime_s);
    json_word(&j, "text", h->prompt != NULL ? h->text : NULL);
    json_word(&j, "finish", h->prompt != NULL ? h->finish : NULL);
    json_u64(&j, "tokens", h->n_answer);
    json_end(&j, '}');
    putchar('\n');
}

int verb_health(int argc, char **argv)
{
    static struct health health; /* static: zeroed, and off the stack */
    struct health *h = &health;
    struct cb_err err = {0, ""};
    int status = EXIT_OK;
    h->listen = "127.0.0.1:8080";
    h->n_tokens = 1;
    h->timeout_s = 10;
    const struct arg rows[] = {
        {.group = "Whom", .name = "--listen", .kind = ARG_TEXT, .out = &h->listen, .meta = "ADDR:PORT",
         .help = "as `serve` was told (default 127.0.0.1:8080)"},
        {.name = "--unix", .kind = ARG_TEXT, .out = &h->unix_path, .meta = "PATH",
         .help = "its Unix socket instead"},
        {.name = "--token-file", .kind = ARG_TEXT, .out = &h->token_file, .meta = "FILE",
         .help = "its tokens; only --prompt needs one"},
        {.group = "What", .name = "--prompt", .alias = "-p", .kind = ARG_TEXT, .out = &h->prompt,
         .meta = "TEXT", .help = "also have this continued, likeliest tokens"},
        {.name = "--n-predict", .alias = "-n", .kind = ARG_U32, .out = &h->n_tokens, .lo = 1, .hi = 512,
         .meta = "N", .help = "by so many tokens (default 1)"},
        {.name = "--timeout", .kind = ARG_U32, .out = &h->timeout_s, .lo = 1, .hi = 3600, .meta = "S",
         .help = "for all of it (default 10)"},
    };
    cli_args_begin(&h->args, "health", "Asks a running `colibri serve` how it is. Exit status 0: well, and it answered;\n"
                                       "1: not well, or nobody answers.");
    cli_args_add(&h->args, rows, sizeof rows / sizeof rows[0]);
    if (cli_args_finish(&h->args, argc, argv, &status))
        return status;
    if (check(h, &err) < 0)
        return cli_error(&h->args, &err);
    report(h);
    return EXIT_OK;
}
