// SPDX-License-Identifier: Apache-2.0
/** The commands of `kvasir`. Each parses its own arguments. */
#ifndef KV_CLI_COMMANDS_H
#define KV_CLI_COMMANDS_H

#include <stddef.h>
#include <stdio.h>

/** Run a command of `kvasir`. Return an exit status. */
int kc_advise_main(int argc, char **argv);
int kc_doctor_main(int argc, char **argv);
int kc_advisor_main(int argc, char **argv);
int kc_replay_main(int argc, char **argv);
int kc_replay_index_main(int argc, char **argv);
int kc_select_main(int argc, char **argv);
int kc_store_main(int argc, char **argv);
int kc_bench_main(int argc, char **argv);
int kc_bench_tiers_main(int argc, char **argv);
int kc_bench_peers_main(int argc, char **argv);
int kc_bench_tiered_main(int argc, char **argv);
int kc_peer_main(int argc, char **argv);
int kc_top_main(int argc, char **argv);
int kc_events_main(int argc, char **argv);

/** The commands below one of kvasir's: an array of structs that begin with a name. */
struct kc_group {
    const char *program; /* "kvasir store" */
    const void *commands;
    size_t n, stride;
    void (*usage)(FILE *out);
};

/**
 * Find the command that argv[1] names. Returns its number, or -1 where the call is answered already:
 * help, version, words for completions (*@ret_status 0), or no command of that name (2).
 */
long kc_find_command(const struct kc_group *group, int argc, char **argv, int *ret_status);

#endif
