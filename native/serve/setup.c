/* setup.c — everything before the first request: defaults, the one mapping,
 * tokens, sockets. */
#if !defined(_WIN32)
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "core/os.h"
#include "core/pool.h"
#include "model/engine.h"
#include "serve/server.h"

#define OTHER_FILES 192u /* shards of the model, twice in a swap, sockets, pipes */

static void set_default(uint32_t *v, uint32_t value)
{
    *v = *v != 0 ? *v : value;
}

void cb_serve_sizes(struct cb_serve_options *o, const struct cb_options *engine,
                    const struct cb_info *info)
{
    o->sequences = engine->sequences != 0 ? engine->sequences : 1;
    o->ctx = info->ctx;
    o->n_moe_layer = info->n_moe_layer;
    o->n_expert = info->n_expert;
}

void cb_serve_defaults(struct cb_serve_options *o)
{
    uint64_t body = (uint64_t)o->ctx * 16;
    set_default(&o->connections, 32);
    set_default(&o->queue, 8);
    set_default(&o->body_bytes, body < 65536 ? 65536u : body > 1048576 ? 1048576u : (uint32_t)body);
    set_default(&o->deadline_s, 600);
    set_default(&o->io_s, 20);
    set_default(&o->idle_s, 60);
    set_default(&o->drain_s, 30);
    set_default(&o->health_s, 30);
    set_default(&o->sequences, 1);
    if (o->listen == NULL)
        o->listen = "127.0.0.1:8080";
}

static void lay_out_requests(struct cb_server *s, struct cb_arena *a)
{
    const struct cb_serve_options *o = &s->opt;
    uint64_t room = (uint64_t)o->body_bytes + 4u * CB_CHAT_PART, answer = (uint64_t)o->ctx * 8 + 4096;
    s->n_req = o->sequences + o->queue;
    s->body_room = o->body_bytes;
    s->text_cap = (uint32_t)(room > answer ? room : answer);
    struct cb_req *req = cb_arena_take(a, CB_L_SERVER, s->n_req, sizeof *req);
    for (uint32_t i = 0; i < s->n_req; i++) {
        int32_t *ids = cb_arena_take(a, CB_L_SERVER, o->ctx + UINT64_C(2), sizeof *ids);
        struct cb_tok *tok = cb_arena_take(a, CB_L_SERVER, o->ctx + UINT64_C(1), sizeof *tok);
        struct cb_top *tops = cb_arena_take(a, CB_L_SERVER, (uint64_t)o->ctx * CB_TOP_ROOM + CB_TOP_MAX,
                                            sizeof *tops);
        char *text = cb_arena_take(a, CB_L_SERVER, s->text_cap, 1);
        if (req == NULL)
            continue;
        req[i].ids = ids;
        req[i].tok = tok;
        req[i].tops = tops;
        req[i].text = text;
        req[i].text_cap = s->text_cap;
    }
    s->req = req;
}

static void lay_out_connections(struct cb_server *s, struct cb_arena *a)
{
    const struct cb_serve_options *o = &s->opt;
    struct cb_conn *conn = cb_arena_take(a, CB_L_SERVER, o->connections, sizeof *conn);
    for (uint32_t i = 0; i < o->connections; i++) {
        uint32_t cap = CB_HTTP_HEAD_MAX + o->body_bytes;
        char *in = cb_arena_take(a, CB_L_SERVER, cap, 1);
        char *out = cb_arena_take(a, CB_L_SERVER, CB_OUT_BYTES, 1);
        if (conn == NULL)
            continue;
        conn[i].fd = -1;
        conn[i].in = in;
        conn[i].in_cap = cap;
        conn[i].out = (struct cb_buf){out, 0, CB_OUT_BYTES, 0};
    }
    s->conn = conn;
    s->pfd = cb_arena_take(a, CB_L_SERVER, o->connections + UINT64_C(4), sizeof *s->pfd);
}

/* Counts, or with a base hands out: the same code twice. */
static void lay_out(struct cb_server *s, struct cb_arena *a)
{
    const struct cb_serve_options *o = &s->opt;
    cb_arena_take(a, CB_L_SERVER, 1, sizeof *s);
    s->stack = cb_arena_take_pages(a, CB_L_SERVER, CB_WORKER_STACK, CB_OS_PAGE * 16u);
    lay_out_requests(s, a);
    lay_out_connections(s, a);
    s->n_json = o->ctx + 256 > CB_JSON_TOKENS ? o->ctx + 256 : CB_JSON_TOKENS;
    s->json = cb_arena_take(a, CB_L_SERVER, s->n_json, sizeof *s->json);
    s->heat = cb_arena_take(a, CB_L_SERVER, (uint64_t)o->n_moe_layer * o->n_expert + 1, sizeof *s->heat);
}

static uint64_t count_bytes(const struct cb_serve_options *o, struct cb_server *draft)
{
    struct cb_arena a;
    memset(&a, 0, sizeof a);
    memset(draft, 0, sizeof *draft);
    draft->opt = *o;
    cb_serve_defaults(&draft->opt);
    lay_out(draft, &a);
    return a.overflow ? UINT64_MAX / 4 : (a.used + CB_OS_PAGE - 1) & ~(uint64_t)(CB_OS_PAGE - 1);
}

uint64_t cb_serve_bytes(const struct cb_serve_options *o)
{
    struct cb_server draft;
    return count_bytes(o, &draft);
}

/* ---- sockets ------------------------------------------------------------ */

static int flags(int fd)
{
    return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0 &&
                   fcntl(fd, F_SETFD, FD_CLOEXEC) == 0
               ? 0
               : -1;
}

static int bind_tcp(struct cb_server *s, struct cb_err *err)
{
    struct cb_address a;
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    int rc = cb_address_parse(&a, s->opt.listen, err), on = 1;
    if (rc < 0)
        return rc;
    if (!a.loopback && s->tokens.n == 0)
        return cb_fail(err, CB_EINVAL, "--listen %.60s can be reached from outside: --token-file FILE "
                       "is needed; or listen on 127.0.0.1 and come by `colibri-kit tunnel HOST` "
                       "or `ssh -L 8080:127.0.0.1:8080 HOST`",
                       s->opt.listen);
    v6.sin6_port = v4.sin_port = htons(a.port);
    memcpy(&v6.sin6_addr, a.ip, 16);
    memcpy(&v4.sin_addr, a.ip, 4);
    int fd = socket(a.v6 ? AF_INET6 : AF_INET, SOCK_STREAM, 0);
    if (fd < 0)
        return cb_fail(err, CB_EIO, "cannot make a socket: %s", strerror(errno));
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (a.v6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(fd, a.v6 ? (struct sockaddr *)&v6 : (struct sockaddr *)&v4,
             a.v6 ? sizeof v6 : sizeof v4) != 0 ||
        flags(fd) != 0) {
        rc = cb_fail(err, CB_EIO, "cannot listen on %.80s: %s", s->opt.listen, strerror(errno));
        close(fd);
        return rc;
    }
    s->listen_fd[0] = fd;
    return CB_OK;
}

static void lock_path(char out[sizeof(struct sockaddr_un) + 8], const char *path)
{
    snprintf(out, sizeof(struct sockaddr_un) + 8, "%s.lock", path);
}

/* While another service loads its model it has the socket, but nobody answers there
 * yet: PATH.lock tells it from a leftover. The kernel frees the lock with the process. */
static int take_lock(struct cb_server *s, const char *path, struct cb_err *err)
{
    char name[sizeof(struct sockaddr_un) + 8];
    struct stat mine, there;
    lock_path(name, path);
    s->lock_fd = open(name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (s->lock_fd < 0)
        return cb_fail(err, CB_EIO, "cannot make %.150s: %s", name, strerror(errno));
    /* One that ends removes the file: what was locked must be what stands there. */
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB) == 0 && fstat(s->lock_fd, &mine) == 0 &&
        lstat(name, &there) == 0 && mine.st_ino == there.st_ino && mine.st_dev == there.st_dev)
        return CB_OK;
    close(s->lock_fd);
    s->lock_fd = -1;
    return cb_fail(err, CB_EIO, "--unix %.150s: another service has it", path);
}

void cb_serve_leave_unix(struct cb_server *s)
{
    char name[sizeof(struct sockaddr_un) + 8];
    if (s->lock_fd < 0)
        return;
    if (s->listen_fd[1] >= 0)
        unlink(s->opt.unix_path);
    lock_path(name, s->opt.unix_path);
    unlink(name);
    close(s->lock_fd);
    s->lock_fd = -1;
}

/* A socket file that nobody answers on may be a leftover. */
static int check_path(const char *path, struct cb_err *err)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return CB_OK;
    if (!S_ISSOCK(st.st_mode))
        return cb_fail(err, CB_EINVAL, "--unix %.150s: there is a file of another kind", path);
    if (cb_os_unix_answers(path))
        return cb_fail(err, CB_EIO, "--unix %.150s: somebody answers there already", path);
    return CB_OK;
}

static int bind_unix(struct cb_server *s, struct cb_err *err)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const char *path = s->opt.unix_path;
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof a.sun_path)
        return cb_fail(err, CB_EINVAL, "--unix: the path has %zu bytes, at most %zu", n,
                       sizeof a.sun_path - 1);
    memcpy(a.sun_path, path, n);
    int rc = check_path(path, err);
    if (rc == CB_OK)
        rc = take_lock(s, path, err);
    if (rc < 0)
        return rc;
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    mode_t before = umask(0117); /* owner and group */
    int bad = fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) != 0 || flags(fd) != 0;
    umask(before);
    if (bad) {
        rc = cb_fail(err, CB_EIO, "cannot listen on %.150s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return rc;
    }
    s->listen_fd[1] = fd;
    return CB_OK;
}

static int open_sockets(struct cb_server *s, struct cb_err *err)
{
    int rc = s->opt.listen[0] != '\0' ? bind_tcp(s, err) : CB_OK;
    if (rc == CB_OK && s->opt.unix_path != NULL)
        rc = bind_unix(s, err);
    if (rc == CB_OK && s->listen_fd[0] < 0 && s->listen_fd[1] < 0)
        rc = cb_fail(err, CB_EINVAL, "neither --listen nor --unix: nobody could ask");
    if (rc == CB_OK && pipe2(s->wake_fd, O_NONBLOCK | O_CLOEXEC) != 0)
        rc = cb_fail(err, CB_EIO, "cannot make a pipe: %s", strerror(errno));
    return rc;
}

/* ---- open and close ----------------------------------------------------- */

int cb_serve_hosts_check(const struct cb_serve_options *o, struct cb_err *err)
{
    for (uint32_t i = 0; i < o->n_host; i++)
        if (o->host[i][0] == '\0' || strlen(o->host[i]) >= CB_SERVE_HOST_BYTES ||
            strpbrk(o->host[i], ": /\t") != NULL)
            return cb_fail(err, CB_EINVAL, "--allow-host %.80s: a name without port", o->host[i]);
    return CB_OK;
}

/* A descriptor for every connection: accept() failing for want of one would leave
 * the listening socket readable for ever. */
static int raise_open_files(const struct cb_serve_options *o, struct cb_err *err)
{
    struct rlimit limit;
    rlim_t want = (rlim_t)o->connections + OTHER_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= want)
        return CB_OK;
    limit.rlim_cur = want;
    if (limit.rlim_max < want || setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return cb_fail(err, CB_EINVAL, "--connections %u needs %llu open files, %llu are allowed",
                       o->connections, (unsigned long long)want, (unsigned long long)limit.rlim_max);
    return CB_OK;
}

int cb_serve_open(const struct cb_serve_options *o, struct cb_server **out, struct cb_err *err)
{
    struct cb_server draft;
    struct cb_arena a;
    *out = NULL;
    memset(&a, 0, sizeof a);
    a.size = count_bytes(o, &draft);
    int rc = cb_serve_hosts_check(o, err);
    if (rc == CB_OK)
        rc = raise_open_files(&draft.opt, err);
    if (rc < 0)
        return rc;
    a.base = cb_os_map(a.size, 0, err);
    if (a.base == NULL)
        return CB_EIO;
    struct cb_server *s = (struct cb_server *)(void *)a.base;
    s->opt = draft.opt;
    s->block = a.base;
    s->block_bytes = a.size;
    lay_out(s, &a);
    s->listen_fd[0] = s->listen_fd[1] = s->wake_fd[0] = s->wake_fd[1] = s->signal_fd = -1;
    s->lock_fd = -1;
    s->notify.fd = -1;
    cb_log_open(&s->log, o->log_fd, o->log_json, &s->log_lost);
    cb_log_bound(&s->log, (uint64_t)o->log_mib << 20);
    s->t_open = cb_os_now_ns();
    s->created = (uint64_t)time(NULL);
    if (getrandom(&s->next_number, sizeof s->next_number, GRND_NONBLOCK) != sizeof s->next_number)
        s->next_number = s->t_open; /* names of answers need not be secret */
    s->next_number >>= 8; /* room to count */
    pthread_mutex_init(&s->lock, NULL);
    cb_cond_init(&s->wake);
    if (o->token_file != NULL)
        rc = cb_tokens_read(&s->tokens, o->token_file, err);
    if (rc == CB_OK)
        rc = open_sockets(s, err);
    if (rc < 0) {
        cb_serve_close(s);
        return rc;
    }
    *out = s;
    return CB_OK;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void cb_serve_close(struct cb_server *s)
{
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < s->opt.connections; i++)
        close_fd(&s->conn[i].fd);
    cb_serve_leave_unix(s);
    close_fd(&s->listen_fd[0]);
    close_fd(&s->listen_fd[1]);
    close_fd(&s->wake_fd[0]);
    close_fd(&s->wake_fd[1]);
    close_fd(&s->signal_fd);
    cb_notify_close(&s->notify);
    cb_log_close(&s->log);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    cb_arena_forget(s->block, s->block_bytes);
    cb_os_unmap(s->block, s->block_bytes);
}
#else
#include "serve/serve.h"

void cb_serve_sizes(struct cb_serve_options *o, const struct cb_options *engine,
                    const struct cb_info *info)
{
    (void)o, (void)engine, (void)info;
}

uint64_t cb_serve_bytes(const struct cb_serve_options *o)
{
    (void)o;
    return 0;
}

int cb_serve_open(const struct cb_serve_options *o, struct cb_server **out, struct cb_err *err)
{
    (void)o;
    *out = NULL;
    return cb_fail(err, CB_EUNSUPPORTED, "the service is not available on Windows");
}

void cb_serve_close(struct cb_server *s)
{
    (void)s;
}

int cb_serve_run(struct cb_server *s, struct cb_engine *e, const struct cb_ledger *ledger,
                 struct cb_err *err)
{
    (void)s, (void)e, (void)ledger;
    return cb_fail(err, CB_EUNSUPPORTED, "the service is not available on Windows");
}

int cb_supervise(const struct cb_supervise *s)
{
    s->child(s->arg, -1);
    return 1;
}
#endif
