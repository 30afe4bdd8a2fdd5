// SPDX-License-Identifier: Apache-2.0
/* `kvasir store restore`, and the file that receives its bytes. */
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/show/format.h"
#include "cli/store/store.h"

/*
 * Destination of restored bytes. A regular file is written beside the wanted one, and then replaces
 * it. Pipes and devices are written in place.
 */
struct output {
    int fd;
    char *tmp;  /* NULL: written in place */
    char *file; /* behind all links; NULL: an open descriptor */
    bool is_stdout;
    int error; /* first error of a write */
};

struct restoring {
    struct kc_store_call *call;
    struct output out;
    bool found; /* the object exists */
};

static int write_fd(void *arg, const void *data, size_t len)
{
    struct output *out = arg;
    const char *p = data;

    while (len > 0) {
        ssize_t n = write(out->fd, p, len);

        if (n < 0 && errno == EINTR && !kc_bar_interrupted())
            continue;
        if (n < 0) {
            out->error = errno == EINTR ? -ECANCELED : -errno;
            return out->error;
        }
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

/*
 * Resolve every symbolic link of @file, as cp and curl do, whether or not a file is at its end.
 * *@ret is malloc'd.
 */
static int behind_links(const char *file, char **ret)
{
    char *path = strdup(file), target[PATH_MAX], *next;

    for (unsigned i = 0; path && i <= 40; i++) {
        ssize_t n = readlink(path, target, sizeof(target) - 1);
        const char *slash = strrchr(path, '/');
        int rc;

        if (n < 0) { /* no link: a file, or no file yet */
            *ret = path;
            return 0;
        }
        target[n] = '\0';
        rc = target[0] == '/' || !slash
                 ? asprintf(&next, "%s", target)
                 : asprintf(&next, "%.*s/%s", (int)(slash - path), path, target);
        free(path);
        path = rc < 0 ? NULL : next;
    }
    free(path);
    return path ? -ELOOP : -ENOMEM;
}

/*
 * Return the descriptor that @file stands for, such as /dev/stdout; -1: none. The user has directed
 * it (`>> log`), so no file may be renamed over it.
 */
static int stands_for(const char *file)
{
    static const char *const FOLDERS[] = {"/dev/fd/", "/proc/self/fd/"};
    char *end;

    if (strcmp(file, "-") == 0 || strcmp(file, "/dev/stdout") == 0)
        return STDOUT_FILENO;
    if (strcmp(file, "/dev/stderr") == 0)
        return STDERR_FILENO;
    for (size_t i = 0; i < KV_COUNT(FOLDERS); i++) {
        size_t len = strlen(FOLDERS[i]);
        unsigned long fd = strncmp(file, FOLDERS[i], len) == 0 && isdigit((unsigned char)file[len])
                               ? strtoul(file + len, &end, 10)
                               : ULONG_MAX;

        if (fd <= INT_MAX && !*end)
            return (int)fd;
    }
    return -1;
}

/*
 * Create the file that will replace the wanted one, with the mode of that one: saved state holds
 * prompts, so it must not become readable for more users.
 */
static int open_beside(struct output *out)
{
    struct stat st;
    mode_t mask;

    if (asprintf(&out->tmp, "%s.kvasir-XXXXXX", out->file) < 0) {
        out->tmp = NULL;
        return -ENOMEM;
    }
    out->fd = mkostemp(out->tmp, O_CLOEXEC);
    if (out->fd < 0)
        return -errno;
    mask = umask(0);
    umask(mask);
    fchmod(out->fd, stat(out->file, &st) == 0 ? st.st_mode & 0777 : 0666 & ~mask);
    return 0;
}

/*
 * Take a descriptor that the caller of this program passed. Refuse those that the program opened
 * itself, the store's files among them: they are marked to be closed on exec.
 */
static int take_descriptor(int own)
{
    int flags = fcntl(own, F_GETFD);

    if (flags >= 0 && (flags & FD_CLOEXEC)) {
        errno = EBADF;
        return -1;
    }
    return flags < 0 ? -1 : fcntl(own, F_DUPFD_CLOEXEC, 0);
}

static void free_output(struct output *out)
{
    free(KV_STEAL(out->tmp));
    free(KV_STEAL(out->file));
}

static int open_output(const char *file, struct output *out)
{
    int rc = 0, own = stands_for(file);
    struct stat st, report;

    *out = (struct output){.fd = -1};
    if (own < 0)
        rc = behind_links(file, &out->file);
    if (rc == 0 && own < 0 && (stat(out->file, &st) != 0 || S_ISREG(st.st_mode)))
        rc = open_beside(out);
    else if (rc == 0)
        out->fd = own >= 0 ? take_descriptor(own) : open(out->file, O_WRONLY | O_CLOEXEC);
    if (rc == 0 && out->fd < 0)
        rc = errno == EINTR ? -ECANCELED : -errno;
    if (rc < 0)
        free_output(out);
    else /* reports must not mix with the bytes */
        out->is_stdout = fstat(out->fd, &st) == 0 && fstat(STDOUT_FILENO, &report) == 0 &&
                         st.st_dev == report.st_dev && st.st_ino == report.st_ino;
    return rc;
}

/* Make the directory entry durable as well, where the system can. */
static void sync_folder(const char *file)
{
    char *folder = strdup(file), *slash = folder ? strrchr(folder, '/') : NULL;
    int fd;

    if (slash)
        slash[slash == folder] = '\0';
    fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(folder);
}

/* Close the output. @rc is the restore's result: after a failure the written part is deleted. */
static int close_output(struct output *out, int rc)
{
    if (rc == 0 && out->tmp && fsync(out->fd) != 0)
        rc = -errno;
    if (close(out->fd) != 0 && rc == 0)
        rc = -errno;
    if (out->tmp && rc == 0 && rename(out->tmp, out->file) != 0)
        rc = -errno;
    if (out->tmp && rc != 0)
        unlink(out->tmp);
    else if (out->tmp)
        sync_folder(out->file);
    free_output(out);
    return rc;
}

/* Report an object that lacks a chunk: evicted in a store with a limit, lost in others. */
static int fail_incomplete(struct kc_store_call *call)
{
    if (kc_store_is_limited(call))
        return kc_store_fail_of(call, call->name, "incomplete: chunks of it were evicted (limit=)",
                                KC_STORE_NOT_FOUND);
    return kc_store_fail_of(call, call->name, "incomplete: chunks of it are missing",
                            KC_STORE_PROBLEMS);
}

/* Tell a missing object from one that lacks a chunk: both are -ENOENT. */
static int fail_restore(struct kc_store_call *call, const struct restoring *r, int rc)
{
    if (r->out.error && rc == r->out.error && rc != -ECANCELED)
        return kc_store_fail_file(call, call->file, rc);
    if (rc == -ENOENT && r->found)
        return fail_incomplete(r->call);
    return kc_store_fail(call, call->name, rc);
}

static int report(struct kc_store_call *call, FILE *f, const struct kvs_result *result,
                  double seconds)
{
    if (call->opts.json) {
        kc_store_json_begin(call);
        kc_store_json_u64(call, "bytes", result->bytes);
        kc_store_json_u64(call, "chunks", result->n_chunks);
        kc_store_json_double(call, "seconds", seconds);
        return kc_store_json_end(call, f, KC_STORE_OK);
    }
    if (f == stdout) {
        kc_store_put_text(f, call->name);
        fprintf(f, ": %s from %s chunks, all verified; %s\n", kc_bytes((double)result->bytes).s,
                kc_count(result->n_chunks).s, kc_duration((uint64_t)(seconds * 1e9)).s);
    }
    return KC_STORE_OK;
}

static int progress(void *arg, uint64_t done, uint64_t total)
{
    struct restoring *r = arg;

    r->found = true;
    return kc_bar_progress(&r->call->bar, done, total);
}

int kc_store_restore(struct kc_store_call *call)
{
    struct restoring r = {.call = call};
    struct kvs_restore_opts opts = {.size = sizeof(opts),
                                    .fingerprint = call->opts.fingerprint,
                                    .verify_first = call->opts.verify_first,
                                    .offset = call->opts.offset,
                                    .length = call->opts.length,
                                    .progress = progress,
                                    .progress_arg = &r};
    struct kvs_result result = {.size = sizeof(result)};
    uint64_t start_ns = kv_now_ns();
    int rc = open_output(call->file, &r.out), written;

    if (rc < 0)
        return kc_store_fail_file(call, call->file, rc);
    call->data_on_stdout = r.out.is_stdout;
    rc = kvs_restore(call->store, call->name, write_fd, &r.out, &opts, &result);
    written = close_output(&r.out, rc);
    kc_bar_finish(&call->bar);
    if (rc < 0)
        return fail_restore(call, &r, rc);
    if (written < 0)
        return kc_store_fail_file(call, call->file, written);
    return report(call, r.out.is_stdout ? stderr : stdout, &result,
                  (double)(kv_now_ns() - start_ns) / 1e9);
}
