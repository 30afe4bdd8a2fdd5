// SPDX-License-Identifier: Apache-2.0
/* The redis rows of store_bench: the plugin beside a minimal client on a bare socket that keeps the
 * same contract, against one redis-server of our own without persistence. The client holds a copy
 * of each value from its put until the save is sent (the caller may reuse its memory at once). It
 * returns each value in a malloc'd buffer, all held until the end of the restore. It computes no
 * checksum. Plugin and client alternate within each round, in changing order; the printed figure is
 * the median of the rounds' ratios. */
#ifndef KV_BENCH_STORE_REDIS_H
#define KV_BENCH_STORE_REDIS_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "store_measure.h"

struct redis {
    pid_t pid;
    int port;
};

static inline int redis_connect(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) < 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return fd;
}

static inline int redis_free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&at, len) < 0 ||
        getsockname(fd, (struct sockaddr *)&at, &len) < 0)
        bench_die("port", -errno);
    close(fd);
    return ntohs(at.sin_port);
}

/* Run the server's program under any of its names: the package redis-tools has it as a checker. */
static inline void redis_exec(const char *port, const char *dir)
{
    static const char *const names[] = {"redis-server", "valkey-server", "redis-check-rdb"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[4096], *list = strdup(getenv("PATH") ? getenv("PATH") : "/usr/bin"), *rest = list;

        for (char *at; list && (at = strsep(&rest, ":"));) {
            snprintf(path, sizeof(path), "%s/%s", at, names[i]);
            execl(path, "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "",
                  "--appendonly", "no", "--dir", dir, (char *)NULL);
        }
        free(list);
    }
    _exit(127);
}

/* Start a server. Returns -1 when there is no redis-server. */
static inline int redis_start(struct redis *redis, const char *dir)
{
    char port[16];

    redis->port = redis_free_port();
    snprintf(port, sizeof(port), "%d", redis->port);
    redis->pid = fork();
    if (redis->pid == 0) {
        int null = open("/dev/null", O_RDWR);

        dup2(null, STDOUT_FILENO);
        redis_exec(port, dir);
    }
    for (int i = 0; i < 500; i++) {
        int fd = redis_connect(redis->port);

        if (fd >= 0) {
            close(fd);
            return 0;
        }
        if (waitpid(redis->pid, NULL, WNOHANG) == redis->pid)
            return -1;
        usleep(10000);
    }
    return -1;
}

static inline void redis_stop(struct redis *redis)
{
    kill(redis->pid, SIGKILL);
    waitpid(redis->pid, NULL, 0);
}

static inline void redis_read(int fd, void *to, size_t len)
{
    for (size_t at = 0; at < len;) {
        ssize_t n = recv(fd, (char *)to + at, len - at, 0);

        if (n <= 0)
            bench_die("redis closed the connection", n < 0 ? -errno : -EIO);
        at += (size_t)n;
    }
}

static inline void redis_write(int fd, struct iovec *v, int n)
{
    while (n) {
        ssize_t done = writev(fd, v, n);

        if (done < 0)
            bench_die("writev", -errno);
        for (; n && (size_t)done >= v->iov_len; v++, n--)
            done -= (ssize_t)v->iov_len;
        if (n) {
            v->iov_base = (char *)v->iov_base + done;
            v->iov_len -= (size_t)done;
        }
    }
}

/* Copy each value, send SET k v for all, then read all replies. */
static inline double redis_raw_put(int fd, const struct load *load)
{
    uint64_t begin = kv_now_ns();
    char reply[5], **held = malloc(load->n * sizeof(char *));

    for (size_t i = 0; i < load->n; i++) {
        held[i] = malloc(load->len);
        memcpy(held[i], load->data + i * load->len, load->len);
    }
    for (size_t i = 0; i < load->n; i++) {
        char head[96];
        int len = snprintf(head, sizeof(head), "*3\r\n$3\r\nSET\r\n$20\r\nraw:%016zx\r\n$%zu\r\n",
                           i, load->len);
        struct iovec v[] = {{head, (size_t)len}, {held[i], load->len}, {"\r\n", 2}};

        redis_write(fd, v, 3);
    }
    for (size_t i = 0; i < load->n; i++)
        redis_read(fd, reply, sizeof(reply));
    for (size_t i = 0; i < load->n; i++)
        free(held[i]);
    free(held);
    return (double)(kv_now_ns() - begin);
}

/* Send all GETs in one write; read each value into a buffer of its own, all held to the end. */
static inline double redis_raw_get(int fd, const struct load *load)
{
    uint64_t begin = kv_now_ns(), compared = 0;
    char *ask = malloc(load->n * 64), head[32], **held = malloc(load->n * sizeof(char *));
    size_t len = 0, head_len = (size_t)snprintf(head, sizeof(head), "$%zu\r\n", load->len);

    for (size_t i = 0; i < load->n; i++)
        len += (size_t)sprintf(ask + len, "*2\r\n$3\r\nGET\r\n$20\r\nraw:%016zx\r\n", i);
    redis_write(fd, &(struct iovec){ask, len}, 1);
    for (size_t i = 0; i < load->n; i++) {
        held[i] = malloc(load->len);
        redis_read(fd, head, head_len);
        redis_read(fd, held[i], load->len);
        redis_read(fd, head, 2);
    }
    for (size_t i = 0; i < load->n; i++) {
        uint64_t pause = kv_now_ns(); /* comparing isn't counted */

        if (memcmp(held[i], load->data + i * load->len, load->len) != 0)
            bench_die("wrong bytes", -EBADMSG);
        compared += kv_now_ns() - pause;
        free(held[i]);
    }
    free(ask);
    free(held);
    return (double)(kv_now_ns() - begin - compared);
}

struct redis_row {
    struct bench_samples ours, raw, ratio;
};

static inline void redis_sample(struct redis_row *row, double ours, double raw)
{
    bench_sample(&row->ours, ours);
    bench_sample(&row->raw, raw);
    bench_sample(&row->ratio, raw / ours);
}

static inline void redis_print(const char *figure, const struct load *load, struct redis_row *row,
                               const char *more)
{
    double bytes = (double)(load->n * load->len);

    bench_line("store",
               "'figure':'redis: "
               "%s','chunks':%zu,'chunk_bytes':%zu,'median_of':%d,'gb_per_s':%.2f,'raw_socket_gb_"
               "per_s':%.2f,'of_raw':%.2f%s",
               figure, load->n, load->len, ROUNDS, bytes / bench_middle(&row->ours),
               bytes / bench_middle(&row->raw), bench_middle(&row->ratio), more);
}

static inline uint64_t redis_trips(struct kvs_store *store)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    return kvs_stats(store, &stats) < 0 ? 0 : stats.round_trips;
}

static inline void redis_rounds(struct kvs_store *store, int fd, struct load *load)
{
    struct redis_row put = {0}, get = {0}, warm = {0};
    uint64_t trips = 0, before;
    char more[128];
    size_t hits;

    for (int round = -1; round < ROUNDS; round++) {
        double raw_put_ns = 0, raw_get_ns = 0, put_ns = 0, get_ns = 0, warm_ns;

        load_next(load);
        for (int turn = 0; turn < 2; turn++) /* the yardstick goes first in every other round */
            if ((turn + round) % 2 == 0)
                raw_put_ns = redis_raw_put(fd, load);
            else
                put_ns = load_save(store, load, &hits);
        for (int turn = 0; turn < 2; turn++)
            if ((turn + round) % 2 == 0)
                raw_get_ns = redis_raw_get(fd, load);
            else
                get_ns = load_restore(store, load);
        load_get_all(store, load, true);
        before = redis_trips(store);
        warm_ns = load_save(store, load, &hits);
        trips = redis_trips(store) - before;
        for (size_t i = 0; i < load->n; i++) /* so that the server doesn't keep all rounds */
            (void)kvs_delete_chunk(store, load->keys + i * KEY, KEY);
        if (round < 0)
            continue;
        redis_sample(&put, put_ns, raw_put_ns);
        redis_sample(&get, get_ns, raw_get_ns);
        redis_sample(&warm, warm_ns, raw_put_ns);
    }
    redis_print("put, one save", load, &put, "");
    redis_print("get, one restore", load, &get, "");
    snprintf(more, sizeof(more), ",\"ms\":%.3f,\"round_trips\":%llu",
             bench_middle(&warm.ours) / 1e6, (unsigned long long)trips);
    redis_print("warm save", load, &warm, more);
}

/* Run the redis rows. Without a server or a plugin, print the reason on stderr. */
static inline void bench_redis(const char *dir)
{
    struct redis redis;
    struct kvs_store *store;
    struct load load;
    char uri[64];
    int fd, rc;

    if (redis_start(&redis, dir) < 0) {
        fprintf(stderr, "store_bench: no redis-server here: its rows are left out\n");
        return;
    }
    snprintf(uri, sizeof(uri), "redis://127.0.0.1:%d/0", redis.port);
    rc = kvs_open(uri, &store);
    if (rc < 0) {
        fprintf(
            stderr,
            "store_bench: no redis plugin here ($KV_STORE_LIBRARY_PATH): its rows are left out\n");
        redis_stop(&redis);
        return;
    }
    fd = redis_connect(redis.port);
    load_init(&load, 96, 1 << 20);
    redis_rounds(store, fd, &load);
    load_fini(&load);
    close(fd);
    kvs_close(store);
    redis_stop(&redis);
}

#endif
