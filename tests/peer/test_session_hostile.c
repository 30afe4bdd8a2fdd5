// SPDX-License-Identifier: Apache-2.0
/*
 * Peers that lie, stop halfway, come in crowds or never read: each is cut off, nothing is written
 * where it shouldn't be, memory and descriptors stay bounded, and honest peers are served meanwhile.
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/core/log.h"
#include "base/unit.h"
#include "raw_peer.h"
#include "skip.h"

#define BULK 61
#define BULK_BYTES (4u << 20)

static struct kvbm_agent *owner;
static char at[108];
static atomic_int n_done, n_ended;
static uint8_t memory[BULK_BYTES];
static struct raw raw;

static void done(void *arg)
{
    (void)arg;
    n_done++;
}

static void serve_bulk(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    const struct iovec from = {memory, sizeof(memory)};

    (void)arg;
    (void)kvbm_session_reply_from(session, request->id, 0, &from, 1, done, NULL);
}

static void watch(void *arg, struct kvbm_session *session, bool begun)
{
    (void)arg, (void)session;
    n_ended += !begun;
}

static int setup(void **state)
{
    const char *endpoint = unix_endpoint();
    struct kvbm_agent_opts opts = session_opts("owner", &endpoint);

    (void)state;
    kv_log_set_level(KV_LOG_ERROR);
    snprintf(at, sizeof(at), "%s", endpoint);
    opts.max_requests = 8;
    owner = agent_of(&opts);
    assert_int_equal(kvbm_agent_watch(owner, watch, NULL), 0);
    assert_int_equal(kvbm_agent_serve(owner, ECHO, serve_echo, NULL), 0);
    assert_int_equal(kvbm_agent_serve(owner, BULK, serve_bulk, NULL), 0);
    n_done = n_ended = 0;
    return 0;
}

/* An honest agent is served, whatever was before. */
static void check_honest(void)
{
    struct kvbm_agent *reader = agent_at("reader", NULL);
    struct kvbm_reply reply = {0};
    struct kvbm_session *session = NULL;

    assert_int_equal(open_with(reader, at, 0, NULL, &session), 0);
    assert_int_equal(kvbm_session_call(session, ECHO, "here", 4, -1, soon(), &reply), 0);
    assert_int_equal(reply.len, 4);
    kvbm_reply_fini(&reply);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
}

static int teardown(void **state)
{
    (void)state;
    check_honest();
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    kv_log_set_level(KV_LOG_WARN);
    return 0;
}

/* ---- before the session is open ---- */

static void test_garbage(void **state)
{
    static const char *const texts[] = {"GET / HTTP/1.1\r\nHost: a\r\nAccept: everything\r\n\r\n",
                                        "\x16\x03\x01 as TLS begins, and so on for 40 bytes"};
    uint8_t zeros[KVBM_FRAME_BYTES] = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(texts); i++) {
        raw_connect(&raw, at);
        raw_bytes(&raw, texts[i], strlen(texts[i]) + 1);
        raw_expect_end(&raw);
    }
    raw_connect(&raw, at);
    raw_bytes(&raw, zeros, sizeof(zeros));
    raw_expect_end(&raw);
}

/* Every beginning of a HELLO, and then nothing: the handshake's time ends it. */
static void test_halves(void **state)
{
    const struct kvbm_hello hello = raw_who("half", 77);
    const size_t lens[] = {0, 1, 39, 40, 41, 100};
    const char *endpoint = unix_endpoint();
    struct kvbm_agent_opts opts = session_opts("hurried", &endpoint);
    struct kvbm_agent *hurried;
    struct raw raws[KV_COUNT(lens)];
    struct kv_buf bytes = KV_BUF_INIT;
    uint8_t head[KVBM_FRAME_BYTES] = {0};
    struct kvbm_frame frame = {.type = KVBM_HELLO};

    (void)state;
    opts.handshake_ms = 300;
    hurried = agent_of(&opts);
    kv_buf_append(&bytes, head, sizeof(head));
    kvbm_hello_write(&hello, &bytes);
    frame.len = (uint32_t)(bytes.len - sizeof(head));
    frame.total = frame.len;
    kvbm_frame_write(&frame, (uint8_t *)bytes.data);
    for (size_t i = 0; i < KV_COUNT(lens); i++) {
        raw_connect(&raws[i], endpoint);
        raw_bytes(&raws[i], bytes.data, lens[i]);
    }
    for (size_t i = 0; i < KV_COUNT(lens); i++)
        raw_expect_end(&raws[i]);
    kv_buf_fini(&bytes);
    assert_int_equal(kvbm_agent_destroy(hurried), 0);
}

/* Lengths, types and flags of frames that no honest opener sends first. */
static void test_first_frames(void **state)
{
    static const struct kvbm_frame frames[] = {
        {.type = KVBM_HELLO, .len = 1u << 31, .total = 1u << 31},
        {.type = KVBM_HELLO, .len = 2000, .total = 2000},
        {.type = KVBM_HELLO, .len = 0, .total = 100},
        {.type = KVBM_HELLO, .len = 0, .offset = 100},
        {.type = KVBM_PROOF},
        {.type = KVBM_READY},
        {.type = KVBM_SET, .len = 8u << 20, .total = 8u << 20},
        {.type = ECHO, .id = 1},
        {.type = ECHO, .id = 1, .flags = KVBM_FRAME_REPLY},
        {.type = KVBM_PING},
        {.type = 64},
        {.type = KVBM_HELLO, .flags = KVBM_FRAME_FD},
        {.type = KVBM_HELLO, .flags = 8},
        {.type = KVBM_HELLO, .status = -5000}};
    uint8_t head[KVBM_FRAME_BYTES];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(frames); i++) {
        raw_connect(&raw, at);
        kvbm_frame_write(&frames[i], head);
        raw_bytes(&raw, head, sizeof(head));
        raw_expect_end(&raw);
    }
}

/* A later version of the protocol is told so, whatever else its greeting has become. */
static void test_version(void **state)
{
    uint8_t greeting[300] = {2, 0, 3, 0, 0xff, 0xff};

    (void)state;
    raw_connect(&raw, at);
    raw_say(&raw, KVBM_HELLO, 0, greeting, sizeof(greeting));
    assert_true(raw_until(&raw, KVBM_REFUSE));
    assert_int_equal(raw.frame.status, -EPROTONOSUPPORT);
    close(raw.fd);
}

static size_t count_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* The agent closes its side of a connection in its own time. */
static void wait_for_descriptors(size_t most)
{
    wait_until(count_descriptors() <= most);
}

/* A crowd that connects and says nothing: the agent holds 128 at most, and honest ones get in. */
static void test_crowd(void **state)
{
    static struct raw crowd[300];
    size_t before = count_descriptors();

    (void)state;
    for (size_t i = 0; i < KV_COUNT(crowd); i++)
        raw_connect(&crowd[i], at);
    check_honest();
    assert_true(count_descriptors() <= before + KV_COUNT(crowd) + 128 + 4);
    for (size_t i = 0; i < KV_COUNT(crowd) - 128; i++) /* the oldest were pushed out */
        raw_expect_end(&crowd[i]);
    for (size_t i = KV_COUNT(crowd) - 128; i < KV_COUNT(crowd); i++)
        close(crowd[i].fd);
}

#define TEN_THOUSAND 10000u

static long resident_kib(void)
{
    char text[128] = "";
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    assert_non_null(file);
    assert_non_null(fgets(text, sizeof(text), file));
    fclose(file);
    assert_int_equal(sscanf(text, "%*s %ld", &pages), 1);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static int connect_to(const struct sockaddr *address, socklen_t len)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    assert_int_equal(connect(fd, address, len), 0);
    return fd;
}

/* Connect ten thousand times; every other one says the beginning of a greeting. */
static void crowd_at(const struct sockaddr *address, socklen_t len)
{
    static const char half[] = "KVP\1\1\0";
    int *fds = calloc(TEN_THOUSAND, sizeof(*fds));
    size_t before = count_descriptors();
    long kib = resident_kib();

    (void)kib;
    assert_non_null(fds);
    for (size_t i = 0; i < TEN_THOUSAND; i++) {
        fds[i] = connect_to(address, len);
        if (i % 2)
            (void)!send(fds[i], half, sizeof(half) - 1, MSG_NOSIGNAL);
        if (i % 2500 == 0)
            check_honest();
    }
    check_honest();
    assert_true(count_descriptors() <= before + TEN_THOUSAND + 128 + 4);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which keep freed memory */
    assert_true(resident_kib() - kib < 64 << 10);
#endif
    for (size_t i = 0; i < TEN_THOUSAND; i++)
        close(fds[i]);
    free(fds);
}

static void test_ten_thousand(void **state)
{
    const struct rlimit more = {TEN_THOUSAND + 1000, TEN_THOUSAND + 1000};
    struct sockaddr_un unix_address = raw_address(at);
    struct sockaddr_in tcp = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct kvbm_agent *listener;
    struct rlimit before;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    if (before.rlim_cur < more.rlim_cur && setrlimit(RLIMIT_NOFILE, &more) < 0)
        skip_because("a process may not have 11,000 descriptors here");
    crowd_at((struct sockaddr *)&unix_address, sizeof(unix_address));
    listener = agent_at("listener", "tcp:127.0.0.1:0");
    tcp.sin_port = htons((uint16_t)atoi(strrchr(endpoint_of(listener), ':') + 1));
    crowd_at((struct sockaddr *)&tcp, sizeof(tcp));
    assert_int_equal(kvbm_agent_destroy(listener), 0);
    (void)setrlimit(RLIMIT_NOFILE, &before);
}

/* ---- sessions that the agent opens beside a crowd ---- */

static struct raw slow_listener;
static atomic_bool greeted, crowd_is_there;

/* A listener that takes its time for the handshake. */
static void *slow_main(void *arg)
{
    int fd = *(int *)arg;

    slow_listener.fd = accept(fd, NULL, NULL);
    assert_true(slow_listener.fd >= 0);
    raw_await(&slow_listener);
    greeted = true;
    wait_until(crowd_is_there);
    raw_welcome(&slow_listener, "slow");
    raw_expect_end(&slow_listener);
    return NULL;
}

static void *open_slow(void *arg)
{
    static struct kvbm_session *session;
    int rc = open_with(owner, arg, 0, NULL, &session);

    if (rc == 0)
        (void)kvbm_session_close(session);
    return (void *)(intptr_t)rc;
}

/* A crowd pushes its own out, and not the sessions that the agent is opening itself. */
static void test_opens_beside_crowd(void **state)
{
    static struct raw crowd[300];
    char endpoint[108];
    struct sockaddr_un address;
    pthread_t listens, opens;
    int fd = raw_socket();
    void *rc;

    (void)state;
    snprintf(endpoint, sizeof(endpoint), "%s", unix_endpoint());
    address = raw_address(endpoint);
    greeted = crowd_is_there = false;
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fd, 1), 0);
    assert_int_equal(pthread_create(&listens, NULL, slow_main, &fd), 0);
    assert_int_equal(pthread_create(&opens, NULL, open_slow, endpoint), 0);
    wait_until(greeted);
    for (size_t i = 0; i < KV_COUNT(crowd); i++)
        raw_connect(&crowd[i], at);
    for (size_t i = 0; i < KV_COUNT(crowd) - 128; i++)
        raw_expect_end(&crowd[i]);
    crowd_is_there = true;
    pthread_join(opens, &rc);
    for (size_t i = KV_COUNT(crowd) - 128; i < KV_COUNT(crowd); i++)
        close(crowd[i].fd);
    pthread_join(listens, NULL);
    close(fd);
    unlink(address.sun_path);
    assert_int_equal((intptr_t)rc, 0);
}

/* ---- within a session ---- */

static void expect_cut_off(const struct kvbm_frame *frame, const void *body, size_t len)
{
    uint8_t head[KVBM_FRAME_BYTES];

    raw_open(&raw, at, "liar");
    kvbm_frame_write(frame, head);
    raw_bytes(&raw, head, sizeof(head));
    raw_bytes(&raw, body, len);
    raw_expect_end(&raw);
}

static void test_frames(void **state)
{
    static const struct kvbm_frame frames[] = {
        {.type = KVBM_HELLO},
        {.type = KVBM_READY},
        {.type = KVBM_SET},
        {.type = KVBM_SET, .id = 3},
        {.type = KVBM_SET, .len = 40, .total = 40},
        {.type = KVBM_SET, .len = 9u << 20, .total = 9u << 20},
        {.type = KVBM_SET_GONE},
        {.type = KVBM_PING, .len = 17, .total = 17},
        {.type = ECHO, .id = 1, .len = 2u << 20, .total = 2u << 20},
        {.type = ECHO, .id = 1, .flags = KVBM_FRAME_REPLY}, /* nobody asked */
        {.type = ECHO, .id = 1, .flags = KVBM_FRAME_CUT},
        {.type = ECHO, .id = 1, .flags = KVBM_FRAME_FD}, /* without one */
        {.type = 15}};
    static const uint8_t body[64];

    (void)state;
    for (size_t i = 0; i < KV_COUNT(frames); i++)
        expect_cut_off(&frames[i], body, frames[i].len <= sizeof(body) ? frames[i].len : 0);
}

/* A set of another agent, though in itself correct. */
static void test_foreign_set(void **state)
{
    struct kvbm_agent *other = agent_named("other", 5);
    struct kvbm_layout *layout = small_layout();
    struct kvbm_blockset_opts opts = {.size = sizeof(opts), .layout = layout};
    struct kvbm_blockset *set = NULL;
    uint8_t bytes[SET_CAP];
    struct kvbm_frame frame = {.type = KVBM_SET};

    (void)state;
    assert_int_equal(kvbm_blockset_export(other, &opts, &set), 0);
    frame.len = (uint32_t)bytes_of(set, bytes);
    frame.total = frame.len;
    expect_cut_off(&frame, bytes, frame.len);
    kvbm_blockset_destroy(set);
    kvbm_layout_destroy(layout);
    assert_int_equal(kvbm_agent_destroy(other), 0);
}

/* Half of a large body, and then nothing: it takes the memory that came, and goes with the peer. */
static void test_half_body(void **state)
{
    static const uint8_t some[1000];
    const struct kvbm_frame frame = {.type = KVBM_SET, .len = 8u << 20, .total = 8u << 20};
    uint8_t head[KVBM_FRAME_BYTES];

    (void)state;
    raw_open(&raw, at, "half");
    kvbm_frame_write(&frame, head);
    raw_bytes(&raw, head, sizeof(head));
    raw_bytes(&raw, some, sizeof(some));
    check_honest();
    close(raw.fd);
    wait_until(n_ended >= 2); /* of the honest one, too */
}

/* A peer asks for bulk and never reads: as many answers wait as requests are allowed, no more. */
static void test_never_reads(void **state)
{
    struct pollfd polled = {.events = POLLRDHUP};
    int size = 4096;

    (void)state;
    raw_open(&raw, at, "deaf");
    polled.fd = raw.fd;
    (void)setsockopt(raw.fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
    for (uint64_t id = 1; id <= 8; id++)
        raw_say(&raw, BULK, id, NULL, 0);
    check_honest();
    assert_int_equal(n_done, 0); /* 4 MiB don't fit into any socket here */
    raw_say(&raw, BULK, 9, NULL, 0);
    /* Wait for the end without a read: an answer that leaves makes room for the ninth request. */
    assert_int_equal(poll(&polled, 1, (int)(SOON_NS / KV_NS_PER_MS)), 1);
    close(raw.fd);
    wait_until(n_done >= 8);
}

/* One id twice. */
static void test_same_id(void **state)
{
    (void)state;
    raw_open(&raw, at, "twice");
    raw_say(&raw, BULK, 1, NULL, 0);
    raw_say(&raw, BULK, 1, NULL, 0);
    raw_expect_end(&raw);
}

/* Make a child that has copies of all descriptors, as the workers of an engine do. */
static pid_t fork_idle(void)
{
    pid_t parent = getpid(), pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where a test fails */
    while (pid == 0 && getppid() == parent)
        pause();
    if (pid == 0)
        _exit(0);
    return pid;
}

/* A session ends while a child of this process has its socket, too: the peer sees that, and says what it likes. */
static void test_forked(void **state)
{
    pid_t child;

    (void)state;
    raw_open(&raw, at, "chatty");
    child = fork_idle();
    raw_say(&raw, KVBM_HELLO, 0, NULL, 0);
    wait_until(n_ended > 0);
    check_honest(); /* behind that, the agent has freed the session */
    for (int i = 0; i < 10; i++)
        raw_say(&raw, KVBM_PING, 0, NULL, 0);
    check_honest();
    raw_expect_end(&raw);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

/* An agent ends while a child has its listeners: the next one takes their place. */
static void test_forked_listener(void **state)
{
    struct kvbm_agent *first = agent_at("first", "tcp:127.0.0.1:0");
    char endpoint[256];
    pid_t child;

    (void)state;
    snprintf(endpoint, sizeof(endpoint), "%s", endpoint_of(first));
    child = fork_idle();
    assert_int_equal(kvbm_agent_destroy(first), 0);
    assert_int_equal(kvbm_agent_destroy(agent_at("second", endpoint)), 0);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

/* Descriptors that belong to no frame. */
static void test_descriptors(void **state)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    const struct kvbm_frame ping = {.type = KVBM_PING};
    uint8_t head[KVBM_FRAME_BYTES];
    struct iovec bytes = {head, sizeof(head)};
    struct msghdr message = {.msg_iov = &bytes,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    size_t before;

    (void)state;
    raw_open(&raw, at, "giver");
    before = count_descriptors();
    kvbm_frame_write(&ping, head);
    *c = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(c), &raw.fd, sizeof(int));
    for (int i = 0; i < 10; i++)
        (void)sendmsg(raw.fd, &message, MSG_NOSIGNAL);
    raw_expect_end(&raw);
    wait_for_descriptors(before);
}

/* Several descriptors in one message, as one frame never brings them: all are closed. */
static void test_two_descriptors(void **state)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    const struct kvbm_frame ping = {.type = KVBM_PING};
    uint8_t head[KVBM_FRAME_BYTES];
    struct iovec bytes = {head, sizeof(head)};
    struct msghdr message = {.msg_iov = &bytes,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    size_t before = count_descriptors();

    (void)state;
    kvbm_frame_write(&ping, head);
    for (int i = 0; i < 10; i++) {
        int two[2];

        raw_open(&raw, at, "giver");
        two[0] = two[1] = raw.fd;
        *c = (struct cmsghdr){CMSG_LEN(sizeof(two)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), two, sizeof(two));
        assert_int_equal(sendmsg(raw.fd, &message, MSG_NOSIGNAL), sizeof(head));
        raw_expect_end(&raw);
    }
    check_honest();
    wait_for_descriptors(before);
}

/* ---- owners that lie ---- */

struct lie {
    struct kvbm_frame frames[3];
    size_t n;
    long rc;
};

#define C KVBM_CHUNK_BYTES
#define REPLY .type = BULK, .id = 1, .flags = KVBM_FRAME_REPLY

/* A caller with room for one and a half chunks. */
static const struct lie lies[] = {
    {{{REPLY, .len = C, .total = C}}, 1, C},
    {{{REPLY, .len = C, .total = C + 10}, {REPLY, .len = 10, .total = C + 10, .offset = C}},
     2,
     C + 10},
    {{{REPLY, .len = 10, .total = C + 10, .offset = C}, {REPLY, .len = C, .total = C + 10}},
     2,
     C + 10},
    {{{REPLY, .len = C, .total = C + 10}, {REPLY, .len = C, .total = C + 10}},
     2,
     -EPIPE}, /* again */
    {{{REPLY, .len = C, .total = C + 10}, {REPLY, .len = 20, .total = C + 20, .offset = C}},
     2,
     -EPIPE},
    {{{REPLY, .len = C, .total = 2 * C}}, 1, -EMSGSIZE},
    {{{REPLY, .len = C, .total = UINT64_C(1) << 60}}, 1, -EPIPE},
    {{{REPLY, .len = 5, .total = C + 10}}, 1, -EPIPE},
    {{{REPLY, .len = 5, .total = 5, .offset = 7}}, 1, -EPIPE},
    {{{REPLY, .len = C, .total = C + 10},
      {.type = BULK, .id = 1, .flags = KVBM_FRAME_REPLY | KVBM_FRAME_CUT, .status = -EIO}},
     2,
     -EIO},
    {{{.type = ECHO, .id = 1, .flags = KVBM_FRAME_REPLY, .len = 5, .total = 5}}, 1, -EPIPE},
    {{{.type = BULK, .id = 2, .flags = KVBM_FRAME_REPLY, .len = 5, .total = 5}}, 1, -EPIPE},
};

static void *lie_main(void *arg)
{
    const struct lie *lie = arg;
    static uint8_t body[C];

    raw_welcome(&raw, "liar");
    if (!raw_until(&raw, BULK))
        return NULL;
    memset(body, 0xEE, sizeof(body));
    for (size_t i = 0; i < lie->n; i++) {
        uint8_t head[KVBM_FRAME_BYTES];

        kvbm_frame_write(&lie->frames[i], head);
        raw_bytes(&raw, head, sizeof(head));
        raw_bytes(&raw, body, lie->frames[i].len);
    }
    raw_expect_end(&raw);
    return NULL;
}

static struct raw listener;

static void *accept_main(void *arg)
{
    raw.fd = accept(listener.fd, NULL, NULL);
    assert_true(raw.fd >= 0);
    return lie_main(arg);
}

static void check_lie(const struct lie *lie)
{
    const char *endpoint = unix_endpoint();
    struct sockaddr_un address = raw_address(endpoint);
    struct kvbm_agent *reader = agent_at("reader", NULL);
    size_t room = C + C / 2, wall = 4096;
    uint8_t *got = malloc(room + wall);
    struct iovec to = {got, room};
    struct kvbm_session *session = NULL;
    pthread_t thread;
    long rc;

    memset(got, 0x11, room + wall);
    listener.fd = raw_socket();
    assert_int_equal(bind(listener.fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener.fd, 1), 0);
    assert_int_equal(pthread_create(&thread, NULL, accept_main, (void *)lie), 0);
    assert_int_equal(open_with(reader, endpoint, 0, NULL, &session), 0);
    rc = kvbm_session_call_into(session, BULK, "", 0, &to, 1, soon(), NULL);
    if (rc != lie->rc)
        fail_msg("lie %td: %ld", lie - lies, rc);
    for (size_t i = rc > 0 ? (size_t)rc : room; i < room + wall; i++)
        assert_int_equal(got[i], 0x11);
    assert_int_equal(kvbm_session_close(session), 0);
    pthread_join(thread, NULL);
    close(listener.fd);
    unlink(address.sun_path);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    free(got);
}

static void test_lies(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(lies); i++)
        check_lie(&lies[i]);
}

/* ---- two connections ---- */

static struct {
    struct raw data;
    _Atomic bool returned; /* the reader's call */
} cutter;

static void await_read(int fd)
{
    int unread = 1;

    wait_until(ioctl(fd, SIOCOUTQ, &unread) != 0 || unread <= 0);
}

/* Send half a chunk by the data connection, end the answer by the other one, then the other half. */
static void *cut_main(void *arg)
{
    const struct kvbm_frame chunk = {REPLY, .len = C, .total = C + 10};
    const struct kvbm_frame cut = {
        .type = BULK, .id = 1, .flags = KVBM_FRAME_REPLY | KVBM_FRAME_CUT, .status = -EIO};
    static uint8_t body[C];
    uint8_t head[KVBM_FRAME_BYTES];

    (void)arg;
    raw.fd = accept(listener.fd, NULL, NULL);
    raw_welcome(&raw, "cutter");
    cutter.data.fd = accept(listener.fd, NULL, NULL);
    raw_greet(&cutter.data, "cutter");
    assert_true(raw_until(&raw, BULK));
    memset(body, 0xEE, sizeof(body));
    kvbm_frame_write(&chunk, head);
    raw_bytes(&cutter.data, head, sizeof(head));
    raw_bytes(&cutter.data, body, C / 2);
    await_read(cutter.data.fd);
    raw_frame(&raw, &cut, NULL);
    wait_until(cutter.returned);
    raw_bytes(&cutter.data, body, C - C / 2);
    await_read(cutter.data.fd);
    assert_true(raw_until(&raw, ECHO)); /* the session goes on */
    raw_frame(&raw,
              &(struct kvbm_frame){.type = ECHO, .id = raw.frame.id, .flags = KVBM_FRAME_REPLY},
              NULL);
    raw_expect_end(&raw);
    close(cutter.data.fd);
    return NULL;
}

static void test_cut_overtakes(void **state)
{
    const char *endpoint = unix_endpoint();
    struct sockaddr_un address = raw_address(endpoint);
    struct kvbm_agent *reader = agent_at("reader", NULL);
    uint8_t *got = malloc(2 * C);
    struct iovec to = {got, 2 * C};
    struct kvbm_session *session = NULL;
    struct kvbm_reply reply = {0};
    pthread_t thread;

    (void)state;
    cutter.returned = false;
    listener.fd = raw_socket();
    assert_int_equal(bind(listener.fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener.fd, 2), 0);
    assert_int_equal(pthread_create(&thread, NULL, cut_main, NULL), 0);
    assert_int_equal(open_with(reader, endpoint, 1, NULL, &session), 0);
    assert_int_equal(kvbm_session_call_into(session, BULK, "", 0, &to, 1, soon(), NULL), -EIO);
    memset(got, 0x11, 2 * C);
    cutter.returned = true;
    assert_int_equal(kvbm_session_call(session, ECHO, "", 0, -1, soon(), &reply), 0);
    kvbm_reply_fini(&reply);
    for (size_t i = 0; i < 2 * C; i++)
        assert_int_equal(got[i], 0x11);
    assert_int_equal(kvbm_session_close(session), 0);
    pthread_join(thread, NULL);
    close(listener.fd);
    unlink(address.sun_path);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    free(got);
}

/* ---- silence ---- */

static void *mute_main(void *arg)
{
    (void)arg;
    raw.fd = accept(listener.fd, NULL, NULL);
    assert_true(raw.fd >= 0);
    raw_welcome(&raw, "mute");
    assert_true(raw_until(&raw, KVBM_PING)); /* asked whether it is there, and says nothing */
    raw_expect_end(&raw);
    return NULL;
}

/* A frozen peer: nothing closes its socket, and the session ends by keepalive_ms. */
static void test_mute(void **state)
{
    const char *endpoint = unix_endpoint();
    struct sockaddr_un address = raw_address(endpoint);
    struct kvbm_agent_opts opts = session_opts("reader", NULL);
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct kvbm_session *session = NULL;
    struct kvbm_agent *reader;
    pthread_t thread;
    int rc;

    (void)state;
    opts.keepalive_ms = 300;
    reader = agent_of(&opts);
    listener.fd = raw_socket();
    assert_int_equal(bind(listener.fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener.fd, 1), 0);
    assert_int_equal(pthread_create(&thread, NULL, mute_main, NULL), 0);
    rc = open_with(reader, endpoint, 0, NULL, &session);
    assert_true(rc == 0 || rc == -ETIMEDOUT); /* the latter where this machine is slower */
    pthread_join(thread, NULL);
    while (rc == 0) {
        assert_int_equal(kvbm_session_get_info(session, &info), 0);
        if (!info.open) {
            assert_int_equal(info.err, -ETIMEDOUT);
            break;
        }
        usleep(1000);
    }
    assert_int_equal(kvbm_session_close(session), 0);
    close(listener.fd);
    unlink(address.sun_path);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
}

/* ---- answers without an end ---- */

#define N_ENDLESS 8u /* as many as the peer allows */
#define N_CHUNKS 32u /* of each, and one more that never comes: 8 MiB */

/* Send almost all of a long answer to each request. */
static void *endless_main(void *arg)
{
    static uint8_t body[C];

    (void)arg;
    raw.fd = accept(listener.fd, NULL, NULL);
    raw_welcome(&raw, "endless");
    while (raw_next(&raw)) {
        struct kvbm_frame chunk = {.type = raw.frame.type,
                                   .id = raw.frame.id,
                                   .flags = KVBM_FRAME_REPLY,
                                   .len = C,
                                   .total = (N_CHUNKS + 1) * (uint64_t)C};

        if (raw.frame.type != ECHO)
            continue;
        for (; chunk.offset < N_CHUNKS * (uint64_t)C; chunk.offset += C)
            raw_frame(&raw, &chunk, body);
    }
    close(raw.fd);
    return NULL;
}

/* Calls that were given up hold no memory, though their answers never end. */
static void test_endless(void **state)
{
    const char *endpoint = unix_endpoint();
    struct sockaddr_un address = raw_address(endpoint);
    struct kvbm_agent *reader = agent_at("reader", NULL);
    struct kvbm_session *session = NULL;
    struct kvbm_reply reply;
    pthread_t thread;
    long kib;

    (void)state;
    listener.fd = raw_socket();
    assert_int_equal(bind(listener.fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(listener.fd, 1), 0);
    assert_int_equal(pthread_create(&thread, NULL, endless_main, NULL), 0);
    assert_int_equal(open_with(reader, endpoint, 0, NULL, &session), 0);
    kib = resident_kib();
    (void)kib;
    for (uint32_t i = 0; i < N_ENDLESS; i++)
        assert_int_equal(kvbm_session_call(session, ECHO, "", 0, -1, in_ms(200), &reply),
                         -ETIMEDOUT);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(resident_kib() - kib < 40 << 10);
#endif
    assert_int_equal(kvbm_session_close(session), 0);
    pthread_join(thread, NULL);
    close(listener.fd);
    unlink(address.sun_path);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
}

#define HOSTILE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        HOSTILE(test_garbage),      HOSTILE(test_halves),
        HOSTILE(test_first_frames), HOSTILE(test_version),
        HOSTILE(test_crowd),        HOSTILE(test_frames),
        HOSTILE(test_foreign_set),  HOSTILE(test_half_body),
        HOSTILE(test_never_reads),  HOSTILE(test_same_id),
        HOSTILE(test_descriptors),  HOSTILE(test_two_descriptors),
        HOSTILE(test_lies),         HOSTILE(test_mute),
        HOSTILE(test_endless),      HOSTILE(test_cut_overtakes),
        HOSTILE(test_ten_thousand), HOSTILE(test_opens_beside_crowd),
        HOSTILE(test_forked),       HOSTILE(test_forked_listener),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
