// SPDX-License-Identifier: Apache-2.0
/*
 * Agents that are there: one that follows a directory has a session with each agent in it, and a program
 * that only looks sees agents come and go. The directory is a file here; etcd needs no file and drops
 * agents that have died. docs/kvbm-remote.md explains both.
 *
 *     cc -std=gnu11 kvbm_directory.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <kvbm.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static atomic_int there; /* agents in the directory, as on_change saw it */

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* Runs on the directory's thread. */
static void on_change(void *arg, const struct kvbm_directory_peer *peer, bool is_there)
{
    (void)arg;
    printf("%s %s\n", is_there ? "+" : "-", peer->endpoints[0]);
    atomic_fetch_add(&there, is_there ? 1 : -1);
}

/* @endpoint becomes where the agent listens; NULL: it doesn't. */
static struct kvbm_agent *make_agent(const char *name, char *endpoint, size_t size)
{
    const char *any = "tcp:127.0.0.1:0";
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = name,
                                        .fingerprint = "example",
                                        .listen = &any,
                                        .n_listen = endpoint != NULL};
    struct kvbm_agent *agent;

    must(kvbm_agent_create(&who, &agent), "agent");
    if (endpoint)
        must(kvbm_agent_endpoint(agent, 0, endpoint, size, NULL), "endpoint");
    return agent;
}

/* Replace the file at once: who reads it sees the old list or the new one. */
static void write_list(const char *path, const char *first, const char *second)
{
    char draft[96];
    FILE *file;

    snprintf(draft, sizeof(draft), "%s.new", path);
    file = fopen(draft, "w");
    must(file ? fprintf(file, "# a line each\n%s\n%s\n", first, second) : -EIO, draft);
    must(fclose(file) == 0 && rename(draft, path) == 0 ? 0 : -EIO, path);
}

int main(void)
{
    const struct timespec pause = {.tv_nsec = 10000000};
    char path[] = "/tmp/kvbm-peers-XXXXXX", peers[64], at[2][64];
    struct kvbm_directory_opts look = {
        .size = sizeof(look), .peers = peers, .changed = on_change, .reread_ms = 50};
    const struct kvbm_directory_opts list = {.size = sizeof(list), .peers = peers, .reread_ms = 50};
    const struct kvbm_follow_opts follow = {.size = sizeof(follow), .directory = &list};
    struct kvbm_directory_info info = KVBM_DIRECTORY_INFO_INIT;
    struct kvbm_follower_info sessions = KVBM_FOLLOWER_INFO_INIT;
    struct kvbm_directory *directory;
    struct kvbm_follower *follower;
    struct kvbm_agent *agents[2], *reader;

    must(close(mkstemp(path)), path);
    snprintf(peers, sizeof(peers), "file:%s", path);
    agents[0] = make_agent("prefill-0", at[0], sizeof(at[0]));
    agents[1] = make_agent("prefill-1", at[1], sizeof(at[1]));
    write_list(path, at[0], "");
    must(kvbm_directory_open(&look, &directory), "directory");
    reader = make_agent("decode-0", NULL, 0);
    must(kvbm_agent_follow(reader, &follow, &follower), "follow");

    write_list(path, at[0], at[1]); /* another engine has started */
    for (int i = 0; i < 6000 && (sessions.n_open < 2 || there < 2); i++) {
        must(kvbm_follower_get_info(follower, &sessions), "sessions");
        (void)nanosleep(&pause, NULL);
    }
    must(kvbm_directory_get_info(directory, &info), "directory");
    printf("%u peers in the directory, %u sessions open%s%s\n", info.n_peers, sessions.n_open,
           *info.error ? ", " : "", info.error);

    must(kvbm_follower_close(follower), "follower");
    kvbm_directory_close(directory);
    must(kvbm_agent_destroy(reader), "agent");
    must(kvbm_agent_destroy(agents[0]), "agent");
    must(kvbm_agent_destroy(agents[1]), "agent");
    (void)unlink(path);
    return info.n_peers != 2 || sessions.n_open != 2;
}
