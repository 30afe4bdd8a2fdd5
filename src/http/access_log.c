// SPDX-License-Identifier: Apache-2.0
#include "http/access_log.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/queue.h"
#include "base/thread/thread.h"

#define QUEUE 8192u  /* lines */
#define AT_ONCE 64u  /* lines in one write */
#define TEXT_MAX 128 /* bytes of a trace id or model name that are kept */
#define CLOSE_MS 2000

struct line {
    uint16_t len;
    char text[766]; /* each of the strings may double by escaping */
};

struct kh_access_log {
    char *path;
    struct kv_queue *queue;
    pthread_mutex_t lock; /* guards file, which a reopen replaces */
    struct file {
        int fd;
        bool torn;       /* ends inside a line: the next write must end that first */
        uint64_t number; /* of the opening */
    } file;
    _Atomic uint64_t dropped;
    struct kv_wake stop; /* signalled: the thread stops within CLOSE_MS */
    atomic_bool stopping;
    pthread_t thread;
    bool started;
};

/* -- the thread -------------------------------------------------------------------------------- */

/*
 * Wait until @fd accepts more bytes; a regular file always does. Returns false when the time is up.
 */
static bool wait_writable(struct kh_access_log *log, int fd, uint64_t *deadline_ns)
{
    for (;;) {
        bool stopping = atomic_load_explicit(&log->stopping, memory_order_acquire);
        struct pollfd fds[] = {{fd, POLLOUT, 0}, {stopping ? -1 : log->stop.fd, POLLIN, 0}};

        if (stopping && !*deadline_ns)
            *deadline_ns = kv_now_ns() + CLOSE_MS * KV_NS_PER_MS;
        if (*deadline_ns && kv_now_ns() >= *deadline_ns)
            return false;
        poll(fds, 2, *deadline_ns ? (int)kv_ms_until(*deadline_ns, kv_now_ns()) : -1);
        if (fds[0].revents)
            return true;
    }
}

/* Return the number of bytes written: less than @len when the file refuses the rest. */
static size_t write_all(struct kh_access_log *log, int fd, const char *data, size_t len,
                        uint64_t *deadline_ns)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = write(fd, data + done, len - done);

        if (n > 0)
            done += (size_t)n;
        else if (n < 0 && errno == EAGAIN && !wait_writable(log, fd, deadline_ns))
            break;
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            break;
    }
    return done;
}

/* Duplicate the descriptor, so that a reopen doesn't wait for a slow write. */
static struct file current_file(struct kh_access_log *log)
{
    struct file file;

    pthread_mutex_lock(&log->lock);
    file = log->file;
    file.fd = fcntl(file.fd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&log->lock);
    return file;
}

static void note_torn(struct kh_access_log *log, const struct file *file)
{
    pthread_mutex_lock(&log->lock);
    if (log->file.number == file->number)
        log->file.torn = file->torn;
    pthread_mutex_unlock(&log->lock);
}

/* Return the number of lines that end within the first @done bytes, the first one at @start. */
static size_t count_whole(const struct line *lines, size_t n, size_t start, size_t done)
{
    size_t whole = 0;

    while (whole < n && start + lines[whole].len <= done)
        start += lines[whole++].len;
    return whole;
}

static void write_lines(struct kh_access_log *log, const struct line *lines, size_t n,
                        struct kv_buf *buf, uint64_t *deadline_ns)
{
    static struct kv_log_rate rate;
    struct file file = current_file(log);
    size_t start = file.torn, done = 0, whole;
    int why;

    kv_buf_clear(buf);
    if (file.torn)
        kv_buf_putc(buf, '\n');
    for (size_t i = 0; i < n; i++)
        kv_buf_append(buf, lines[i].text, lines[i].len);
    if (file.fd >= 0 && !buf->error)
        done = write_all(log, file.fd, buf->data, buf->len, deadline_ns);
    why = errno;
    if (done)
        file.torn = buf->data[done - 1] != '\n';
    note_torn(log, &file);
    whole = count_whole(lines, n, start, done);
    if (whole < n) {
        atomic_fetch_add_explicit(&log->dropped, n - whole, memory_order_relaxed);
        if (kv_log_allowed(&rate, 1))
            kv_log_warn("access-log", "lines could not be written", "lines=%zu error=\"%s\"",
                        n - whole, strerror(why));
    }
    if (file.fd >= 0)
        close(file.fd);
}

static void *log_main(void *arg)
{
    struct kh_access_log *log = arg;
    struct line *lines = calloc(AT_ONCE, sizeof(*lines));
    struct kv_buf buf = KV_BUF_INIT;
    uint64_t deadline_ns = 0;

    while (lines) {
        long n = kv_queue_pop(log->queue, lines, AT_ONCE, kv_now_ns() + 3600 * KV_NS_PER_S);

        if (n == -EPIPE)
            break;
        if (n > 0)
            write_lines(log, lines, (size_t)n, &buf, &deadline_ns);
    }
    kv_buf_fini(&buf);
    free(lines);
    return NULL;
}

/* -- life -------------------------------------------------------------------------------------- */

/*
 * Open for appending: every line goes to the end of the file, whatever other programs write.
 * Opening never blocks, even for a FIFO.
 */
static int open_path(const char *path, struct kv_error *error)
{
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0640);

    return fd >= 0 ? fd
                   : kv_fail(error, -errno, 0, "can't open the access log %.100s: %s", path,
                             strerror(errno));
}

/* Return true when the regular file @fd of @path doesn't end with a whole line. */
static bool ends_inside_line(int fd, const char *path)
{
    struct stat st;
    char last = '\n';
    int reader;

    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size == 0)
        return false;
    reader = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (reader < 0)
        return false;
    if (pread(reader, &last, 1, st.st_size - 1) != 1)
        last = '\n';
    close(reader);
    return last != '\n';
}

int kh_access_log_open(const char *path, struct kh_access_log **ret, struct kv_error *error)
{
    struct kh_access_log *log = calloc(1, sizeof(*log));
    int rc = -ENOMEM;

    if (!log)
        return kv_fail(error, rc, 0, "out of memory");
    pthread_mutex_init(&log->lock, NULL);
    log->stop.fd = -1;
    log->file.fd = open_path(path, error);
    if (log->file.fd < 0) {
        rc = log->file.fd;
        goto fail;
    }
    log->file.torn = ends_inside_line(log->file.fd, path);
    log->path = strdup(path);
    if (log->path)
        rc = kv_queue_create(sizeof(struct line), QUEUE, &log->queue);
    if (rc == 0)
        rc = kv_wake_open(&log->stop);
    if (rc == 0)
        rc = kv_thread_start(&log->thread, "access-log", log_main, log);
    if (rc < 0) {
        kv_fail(error, rc, 0, "can't start the access log: %s", strerror(-rc));
        goto fail;
    }
    log->started = true;
    *ret = log;
    return 0;
fail:
    kh_access_log_close(log);
    return rc;
}

void kh_access_log_close(struct kh_access_log *log)
{
    if (!log)
        return;
    if (log->started) {
        atomic_store_explicit(&log->stopping, true, memory_order_release);
        kv_wake_signal(&log->stop);
        kv_queue_close(log->queue);
        pthread_join(log->thread, NULL);
    }
    kv_queue_destroy(log->queue);
    kv_wake_close(&log->stop);
    if (log->file.fd >= 0)
        close(log->file.fd);
    pthread_mutex_destroy(&log->lock);
    free(log->path);
    free(log);
}

int kh_access_log_reopen(struct kh_access_log *log, struct kv_error *error)
{
    int fd = open_path(log->path, error), old;
    bool torn;

    if (fd < 0)
        return fd;
    torn = ends_inside_line(fd, log->path);
    pthread_mutex_lock(&log->lock);
    old = log->file.fd;
    log->file = (struct file){.fd = fd, .torn = torn, .number = log->file.number + 1};
    pthread_mutex_unlock(&log->lock);
    close(old);
    return 0;
}

uint64_t kh_access_log_dropped(const struct kh_access_log *log)
{
    return atomic_load_explicit(&log->dropped, memory_order_relaxed);
}

/* -- lines ------------------------------------------------------------------------------------- */

static void put_time(struct kv_json_writer *w)
{
    uint64_t now_ns = kv_wall_ns();
    time_t seconds = (time_t)(now_ns / KV_NS_PER_S);
    char date[24], text[40];
    struct tm tm;

    gmtime_r(&seconds, &tm);
    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(text, sizeof(text), "%s.%03uZ", date, (unsigned)(now_ns % KV_NS_PER_S / KV_NS_PER_MS));
    kv_json_member_str(w, "ts", text);
}

static void put_text(struct kv_json_writer *w, const char *key, const char *text, size_t len)
{
    kv_json_key(w, key);
    if (len == 0)
        kv_json_put_str(w, "-");
    else
        kv_json_put_strn(w, text, KV_MIN(len, (size_t)TEXT_MAX));
}

static void write_line(struct kv_buf *buf, const struct kh_access *access)
{
    struct kv_json_writer w;
    char ms[32];
    int len = snprintf(ms, sizeof(ms), "%.3f", (double)access->duration_ns / 1e6);

    kv_json_writer_init(&w, buf);
    kv_json_begin_object(&w);
    put_time(&w);
    put_text(&w, "trace_id", access->trace_id.p, access->trace_id.len);
    put_text(&w, "method", access->method, strlen(access->method));
    put_text(&w, "path", access->path, strlen(access->path));
    put_text(&w, "model", access->model, access->model ? strlen(access->model) : 0);
    kv_json_member_u64(&w, "status", access->status);
    kv_json_key(&w, "duration_ms");
    kv_json_put_raw(&w, ms, (size_t)len);
    kv_json_end_object(&w);
    kv_buf_putc(buf, '\n');
}

void kh_access_log_put(struct kh_access_log *log, const struct kh_access *access)
{
    struct kv_buf buf = KV_BUF_INIT;
    struct line line;

    write_line(&buf, access);
    if (!buf.error && buf.len <= sizeof(line.text)) {
        line.len = (uint16_t)buf.len;
        memcpy(line.text, buf.data, buf.len);
        if (kv_queue_push(log->queue, &line) == 0) {
            kv_buf_fini(&buf);
            return;
        }
    }
    kv_buf_fini(&buf);
    atomic_fetch_add_explicit(&log->dropped, 1, memory_order_relaxed);
}
