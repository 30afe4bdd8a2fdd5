// SPDX-License-Identifier: Apache-2.0
/*
 * Configuration files of tiered stores. An accepted one names 1 to 16 members, with puts and manifests
 * at members that take them; a refused one gives an error that names the file.
 */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "require.h"
#include "tiered/config.h"

static void check(const struct trd_config *c)
{
    REQUIRE(c->n_members > 0 && c->n_members <= TRD_MEMBERS_MAX);
    REQUIRE(c->n_puts <= c->n_members && c->manifests < c->n_members);
    REQUIRE(c->linger_ms > 0 && c->places > 0);
    for (size_t i = 0; i < c->n_puts; i++)
        REQUIRE(c->puts[i] < c->n_members && !c->members[c->puts[i]].read_only);
    for (size_t i = 0; i < c->n_members; i++) {
        REQUIRE(*c->members[i].name && strlen(c->members[i].name) <= TRD_NAME_MAX);
        REQUIRE(*c->members[i].uri && c->members[i].capacity > 0);
        for (size_t k = 0; k < i; k++)
            REQUIRE(strcmp(c->members[i].name, c->members[k].name) != 0 &&
                    strcmp(c->members[i].uri, c->members[k].uri) != 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct trd_config config;
    struct kv_error error = {0};
    int fd = memfd_create("config", MFD_CLOEXEC), rc;
    char path[64];

    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        return -1;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    rc = trd_config_read(path, &config, &error);
    if (rc < 0) {
        REQUIRE(rc == -EINVAL || rc == -EFBIG);
        REQUIRE(strstr(error.text, path) != NULL);
    } else {
        check(&config);
        trd_config_fini(&config);
    }
    close(fd);
    return 0;
}
