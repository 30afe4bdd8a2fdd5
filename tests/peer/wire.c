// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

#define MAX_PACKET 1500
#define N_WAITING 4096 /* packets under way; more are lost */

struct packet {
    uint64_t due_ns; /* 0: the place is free */
    int to;
    size_t len;
    uint8_t data[MAX_PACKET];
};

struct wire {
    struct wire_end ends[2];
    struct wire_faults faults;
    struct rng rng;
    atomic_uint_fast64_t carried;
    pid_t pid;
    struct packet waiting[N_WAITING];
};

/* ---- the ends ---- */

static int set_up(int control, struct ifreq *device, const char *address)
{
    struct sockaddr_in *in = (struct sockaddr_in *)(void *)&device->ifr_addr;

    memset(in, 0, sizeof(*in));
    in->sin_family = AF_INET;
    if (inet_pton(AF_INET, address, &in->sin_addr) != 1)
        return -EINVAL;
    if (ioctl(control, SIOCSIFADDR, device) < 0)
        return -errno;
    in->sin_addr.s_addr = htonl(0xffffff00);
    if (ioctl(control, SIOCSIFNETMASK, device) < 0)
        return -errno;
    device->ifr_flags = IFF_UP | IFF_RUNNING;
    return ioctl(control, SIOCSIFFLAGS, device) < 0 ? -errno : 0;
}

int wire_end_open(struct wire_end *end, const char *address)
{
    struct ifreq device = {.ifr_name = "wire"};
    int control = -1, err = 0;

    *end = (struct wire_end){-1, -1};
    if (unshare(CLONE_NEWNET) < 0)
        return -errno;
    device.ifr_flags = IFF_TUN | IFF_NO_PI;
    end->net = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    end->tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (end->net < 0 || end->tun < 0 || control < 0 || ioctl(end->tun, TUNSETIFF, &device) < 0)
        err = -errno;
    if (!err)
        err = set_up(control, &device, address);
    if (control >= 0)
        (void)close(control);
    return err;
}

/* ---- the wire ---- */

static bool happens(struct wire *wire, const atomic_uint *thousandths)
{
    return rng_below(&wire->rng, 1000) < atomic_load(thousandths);
}

static void put(struct wire *wire, int to, const uint8_t *data, size_t len)
{
    uint32_t delay = atomic_load(&wire->faults.delay_us);
    struct packet *p = wire->waiting;

    while (p < wire->waiting + N_WAITING && p->due_ns != 0)
        p++;
    if (p == wire->waiting + N_WAITING)
        return;
    memcpy(p->data, data, len);
    p->len = len;
    p->to = to;
    p->due_ns = kv_now_ns() + (delay ? rng_below(&wire->rng, delay) * UINT64_C(1000) : 0);
    if (happens(wire, &wire->faults.damaged))
        p->data[rng_below(&wire->rng, (uint32_t)len)] ^= (uint8_t)(1u << rng_below(&wire->rng, 8));
}

static void take_all(struct wire *wire, int from)
{
    uint8_t data[MAX_PACKET];

    for (ssize_t n; (n = read(wire->ends[from].tun, data, sizeof(data))) > 0;) {
        if (atomic_load(&wire->faults.cut) || happens(wire, &wire->faults.lost))
            continue;
        put(wire, !from, data, (size_t)n);
        if (happens(wire, &wire->faults.repeated))
            put(wire, !from, data, (size_t)n);
    }
}

/* Deliver what is due. Returns the milliseconds until more is, at most 1. */
static int deliver(struct wire *wire)
{
    uint64_t now = kv_now_ns();
    bool more = false;

    for (struct packet *p = wire->waiting; p < wire->waiting + N_WAITING; p++) {
        if (p->due_ns == 0)
            continue;
        if (p->due_ns > now) {
            more = true;
            continue;
        }
        if (!atomic_load(&wire->faults.cut) && write(wire->ends[p->to].tun, p->data, p->len) > 0)
            atomic_fetch_add(&wire->carried, 1);
        p->due_ns = 0;
    }
    return more ? 1 : 50;
}

static void carry(struct wire *wire)
{
    for (;;) {
        struct pollfd polled[2] = {{.fd = wire->ends[0].tun, .events = POLLIN},
                                   {.fd = wire->ends[1].tun, .events = POLLIN}};

        (void)poll(polled, 2, deliver(wire));
        take_all(wire, 0);
        take_all(wire, 1);
    }
}

struct wire *wire_start(const struct wire_end *a, const struct wire_end *b, uint64_t seed)
{
    struct wire *wire =
        mmap(NULL, sizeof(*wire), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (wire == MAP_FAILED)
        return NULL;
    wire->ends[0] = *a;
    wire->ends[1] = *b;
    wire->rng.state = seed;
    wire->pid = fork();
    if (wire->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        carry(wire);
    }
    return wire;
}

struct wire_faults *wire_faults(struct wire *wire)
{
    return &wire->faults;
}

uint64_t wire_carried(const struct wire *wire)
{
    return atomic_load(&wire->carried);
}

void wire_stop(struct wire *wire)
{
    if (wire->pid > 0) {
        (void)kill(wire->pid, SIGKILL);
        (void)waitpid(wire->pid, NULL, 0);
    }
    for (int i = 0; i < 2; i++) {
        (void)close(wire->ends[i].tun);
        (void)close(wire->ends[i].net);
    }
    (void)munmap(wire, sizeof(*wire));
}
