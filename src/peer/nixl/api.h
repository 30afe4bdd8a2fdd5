// SPDX-License-Identifier: Apache-2.0
/**
 * The functions of NIXL 1.x that this library calls, as libnixl_capi.so exports them. Declared here
 * since NIXL's packages install no C header. Objects are pointers that nobody looks into.
 */
#ifndef KVBM_PEER_NIXL_API_H
#define KVBM_PEER_NIXL_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVBM_NIXL_LIBRARY "libnixl_capi.so"
#define KVBM_NIXL_VARIABLE "KV_NIXL_LIB"

/** Results. Errors are negative. */
enum { KVBM_NIXL_DONE = 0, KVBM_NIXL_RUNS = 1 };

enum { KVBM_NIXL_DRAM = 0 };     /* kind of memory */
enum { KVBM_NIXL_OP_WRITE = 1 }; /* operation of a transfer */

/** Options of an agent. */
struct kvbm_nixl_config {
    bool progress_thread, listen_thread;
    int listen_port;
    int thread_sync; /* 0: one thread at a time calls */
    unsigned n_workers;
    uint64_t progress_delay_us, listen_delay_us;
    bool telemetry;
};

/* F(name, arguments): each returns int, a result. */
#define KVBM_NIXL_FUNCTIONS(F)                                                                   \
    F(create_configured_agent,                                                                   \
      (const char *name, const struct kvbm_nixl_config *config, void **agent))                   \
    F(destroy_agent, (void *agent))                                                              \
    F(create_params, (void **params))                                                            \
    F(params_add, (void *params, const char *key, const char *value))                            \
    F(destroy_params, (void *params))                                                            \
    F(create_backend, (void *agent, const char *plugin, void *params, void **backend))           \
    F(destroy_backend, (void *backend))                                                          \
    F(create_opt_args, (void **args))                                                            \
    F(opt_args_add_backend, (void *args, void *backend))                                         \
    F(destroy_opt_args, (void *args))                                                            \
    F(create_reg_dlist, (int kind, void **list))                                                 \
    F(reg_dlist_add_desc, (void *list, uintptr_t addr, size_t len, uint64_t device,              \
                           const void *metadata, size_t metadata_len))                           \
    F(destroy_reg_dlist, (void *list))                                                           \
    F(register_mem, (void *agent, void *list, void *args))                                       \
    F(get_local_md, (void *agent, void **data, size_t *len)) /* *data: malloc */                 \
    F(load_remote_md, (void *agent, const void *data, size_t len, char **name)) /* likewise */   \
    F(invalidate_remote_md, (void *agent, const char *name))                                     \
    F(create_xfer_dlist, (int kind, void **list))                                                \
    F(xfer_dlist_add_desc, (void *list, uintptr_t addr, size_t len, uint64_t device))            \
    F(destroy_xfer_dlist, (void *list))                                                          \
    F(create_xfer_req, (void *agent, int operation, void *local, void *remote, const char *name, \
                        void **request, void *args))                                             \
    F(post_xfer_req, (void *agent, void *request, void *args))                                   \
    F(get_xfer_status, (void *agent, void *request))                                             \
    F(release_xfer_req, (void *agent, void *request))                                            \
    F(destroy_xfer_req, (void *request))                                                         \
    F(create_notif_map, (void **map))                                                            \
    F(get_notifs, (void *agent, void *map, void *args))                                          \
    F(notif_map_clear, (void *map))                                                              \
    F(destroy_notif_map, (void *map))

/** NIXL's functions; valid once kvbm_nixl_load has returned a table. */
struct kvbm_nixl_api {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define KVBM_NIXL_MEMBER(name, arguments) int(*name) arguments;
    KVBM_NIXL_FUNCTIONS(KVBM_NIXL_MEMBER)
#undef KVBM_NIXL_MEMBER
};

extern struct kvbm_nixl_api kvbm_nixl;

#endif
