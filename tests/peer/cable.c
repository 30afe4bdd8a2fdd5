// SPDX-License-Identifier: Apache-2.0
#include "cable.h"

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

#include "base/core/clock.h"

#define MAX_PACKET 1500
#define N_WAITING 4096 /* packets under way; more are lost */

struct packet {
    uint64_t due_ns; /* 0: the place is free */
    int to;
    size_t len;
    uint8_t data[MAX_PACKET];
};

struct cable {
    struct cable_end ends[2];
    struct cable_faults faults;
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

int cable_end_open(struct cable_end *end, const char *address)
{
    struct ifreq device = {.ifr_name = "cable"};
    int control = -1, err = 0;

    *end = (struct cable_end){-1, -1};
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

/* ---- the cable ---- */

static bool happens(struct cable *cable, const atomic_uint *thousandths)
{
    return rng_below(&cable->rng, 1000) < atomic_load(thousandths);
}

static void put(struct cable *cable, int to, const uint8_t *data, size_t len)
{
    uint32_t delay = atomic_load(&cable->faults.delay_us);
    struct packet *p = cable->waiting;

    while (p < cable->waiting + N_WAITING && p->due_ns != 0)
        p++;
    if (p == cable->waiting + N_WAITING)
        return;
    memcpy(p->data, data, len);
    p->len = len;
    p->to = to;
    p->due_ns = kv_now_ns() + (delay ? rng_below(&cable->rng, delay) * UINT64_C(1000) : 0);
    if (happens(cable, &cable->faults.damaged))
        p->data[rng_below(&cable->rng, (uint32_t)len)] ^=
            (uint8_t)(1u << rng_below(&cable->rng, 8));
}

static void take_all(struct cable *cable, int from)
{
    uint8_t data[MAX_PACKET];

    for (ssize_t n; (n = read(cable->ends[from].tun, data, sizeof(data))) > 0;) {
        if (atomic_load(&cable->faults.cut) || happens(cable, &cable->faults.lost))
            continue;
        put(cable, !from, data, (size_t)n);
        if (happens(cable, &cable->faults.repeated))
            put(cable, !from, data, (size_t)n);
    }
}

/* Deliver what is due. Returns the milliseconds until more is, at most 1. */
static int deliver(struct cable *cable)
{
    uint64_t now = kv_now_ns();
    bool more = false;

    for (struct packet *p = cable->waiting; p < cable->waiting + N_WAITING; p++) {
        if (p->due_ns == 0)
            continue;
        if (p->due_ns > now) {
            more = true;
            continue;
        }
        if (!atomic_load(&cable->faults.cut) && write(cable->ends[p->to].tun, p->data, p->len) > 0)
            atomic_fetch_add(&cable->carried, 1);
        p->due_ns = 0;
    }
    return more ? 1 : 50;
}

static void carry(struct cable *cable)
{
    for (;;) {
        struct pollfd polled[2] = {{.fd = cable->ends[0].tun, .events = POLLIN},
                                   {.fd = cable->ends[1].tun, .events = POLLIN}};

        (void)poll(polled, 2, deliver(cable));
        take_all(cable, 0);
        take_all(cable, 1);
    }
}

struct cable *cable_start(const struct cable_end *a, const struct cable_end *b, uint64_t seed)
{
    struct cable *cable =
        mmap(NULL, sizeof(*cable), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (cable == MAP_FAILED)
        return NULL;
    cable->ends[0] = *a;
    cable->ends[1] = *b;
    cable->rng.state = seed;
    cable->pid = fork();
    if (cable->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        carry(cable);
    }
    return cable;
}

struct cable_faults *cable_faults(struct cable *cable)
{
    return &cable->faults;
}

uint64_t cable_carried(const struct cable *cable)
{
    return atomic_load(&cable->carried);
}

void cable_stop(struct cable *cable)
{
    if (cable->pid > 0) {
        (void)kill(cable->pid, SIGKILL);
        (void)waitpid(cable->pid, NULL, 0);
    }
    for (int i = 0; i < 2; i++) {
        (void)close(cable->ends[i].tun);
        (void)close(cable->ends[i].net);
    }
    (void)munmap(cable, sizeof(*cable));
}
