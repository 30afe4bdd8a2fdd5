// SPDX-License-Identifier: Apache-2.0
/** The commands of `kvasir`. Each parses its own arguments. */
#ifndef KV_CLI_COMMANDS_H
#define KV_CLI_COMMANDS_H

/** Run a command of `kvasir`. Return an exit status. */
int kc_replay_main(int argc, char **argv);
int kc_store_main(int argc, char **argv);
int kc_bench_main(int argc, char **argv);
int kc_bench_tiers_main(int argc, char **argv);
int kc_bench_peers_main(int argc, char **argv);
int kc_peer_main(int argc, char **argv);
int kc_top_main(int argc, char **argv);

#endif
