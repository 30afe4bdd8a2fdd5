// SPDX-License-Identifier: Apache-2.0
/* Credentials, TLS and clusters, with real servers. */
#include <stdbool.h>
#include <time.h>

#include "peer/certificates.h"
#include "plane/nats_jwt.h"
#include "plane/nats_unit.h"

static struct nats_server servers[3];
#define server servers[0]

static int stop(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(servers); i++)
        nats_end(&servers[i]);
    return 0;
}

static void make(const char *config)
{
    nats_or_skip();
    nats_make(&server, config);
}

static struct kvp_nats *open_client(struct kvp_nats_opts opts)
{
    struct kvp_nats *nats;

    opts.size = sizeof(opts);
    opts.url = opts.url ? opts.url : server.url;
    opts.reconnect_ms = 20;
    assert_int_equal(kvp_nats_open(&opts, NULL, NULL, &nats), 0);
    return nats;
}

static struct kvp_nats_stats stats_of(struct kvp_nats *nats)
{
    struct kvp_nats_stats stats;

    kvp_nats_get_stats(nats, &stats);
    return stats;
}

static void enters(struct kvp_nats_opts opts)
{
    struct kvp_nats *nats = open_client(opts);

    wait_until(nats_connected(nats));
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    kvp_nats_close(nats, 0);
}

/* The client is refused, tells why, and holds nobody up. */
static void is_refused(struct kvp_nats_opts opts)
{
    struct kvp_nats *nats = open_client(opts);

    wait_until(*stats_of(nats).error);
    assert_int_equal(stats_of(nats).connections, 0);
    assert_int_equal(
        kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "a", .data = "", .len = 0}), 0);
    kvp_nats_close(nats, 1000);
}

static void test_passwords(void **state)
{
    (void)state;
    make("authorization { user: u, password: \"p w\" }");
    nats_start(&server);
    enters((struct kvp_nats_opts){.user = "u", .password = "p w"});
    is_refused((struct kvp_nats_opts){.user = "u", .password = "q"});
    is_refused((struct kvp_nats_opts){.token = "p w"});
    is_refused((struct kvp_nats_opts){.name = "nobody"});
}

static void test_token(void **state)
{
    (void)state;
    make("authorization { token: secret }");
    nats_start(&server);
    enters((struct kvp_nats_opts){.token = "secret"});
    is_refused((struct kvp_nats_opts){.token = "guess"});
}

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void test_nkey(void **state)
{
    struct nats_key user, other;
    char config[300], path[400];

    (void)state;
    make("");
    nats_key_make(&user, NATS_USER);
    nats_key_make(&other, NATS_USER);
    snprintf(config, sizeof(config), "authorization { users: [ { nkey: %s } ] }", user.public);
    nats_configure(&server, config);
    nats_start(&server);
    snprintf(path, sizeof(path), "%.299s/seed", server.folder);
    write_text(path, user.seed);
    enters((struct kvp_nats_opts){.nkey_file = path});
    write_text(path, other.seed);
    is_refused((struct kvp_nats_opts){.nkey_file = path});
    user.seed[10] = user.seed[10] == 'A' ? 'B' : 'A';
    write_text(path, user.seed);
    is_refused((struct kvp_nats_opts){.nkey_file = path});
    is_refused((struct kvp_nats_opts){.nkey_file = "/nonexistent"});
    EVP_PKEY_free(user.pair);
    EVP_PKEY_free(other.pair);
}

/* A credential that ends takes the connection with it; a renewed file brings it back, without loss of
 * what was queued. */
static void test_expired_credential(void **state)
{
    static char operator_jwt[4096], account_jwt[4096], config[9000];
    struct nats_key op, account, user;
    struct kvp_nats *nats;
    char path[400];

    (void)state;
    make("");
    nats_key_make(&op, NATS_OPERATOR);
    nats_key_make(&account, NATS_ACCOUNT);
    nats_key_make(&user, NATS_USER);
    nats_jwt(&op, &op, "\"type\":\"operator\"", 0, operator_jwt, sizeof(operator_jwt));
    nats_jwt(&op, &account,
             "\"type\":\"account\",\"limits\":{\"subs\":-1,\"data\":-1,\"payload\":-1,"
             "\"imports\":-1,\"exports\":-1,\"wildcards\":true,\"conn\":-1,\"leaf\":-1}",
             0, account_jwt, sizeof(account_jwt));
    snprintf(config, sizeof(config), "operator: %s\nresolver: MEMORY\nresolver_preload: { %s: %s }",
             operator_jwt, account.public, account_jwt);
    nats_configure(&server, config);
    nats_start(&server);
    snprintf(path, sizeof(path), "%.299s/user.creds", server.folder);
    nats_creds(path, &account, &user, (long)time(NULL) + 3);
    nats = open_client((struct kvp_nats_opts){.creds_file = path});
    wait_until(nats_connected(nats));
    wait_until(!nats_connected(nats)); /* the server ends it after three seconds */
    assert_int_equal(
        kvp_nats_publish(nats, &(struct kvp_nats_msg){.subject = "a", .data = "x", .len = 1}), 0);
    wait_until(*stats_of(nats).error);
    nats_creds(path, &account, &user, (long)time(NULL) + 3600);
    wait_until(nats_connected(nats));
    assert_int_equal(kvp_nats_flush(nats, 30000), 0);
    assert_int_equal(stats_of(nats).published, 1);
    kvp_nats_close(nats, 0);
    EVP_PKEY_free(op.pair);
    EVP_PKEY_free(account.pair);
    EVP_PKEY_free(user.pair);
}

static void test_tls(void **state)
{
    struct certificates files;
    char config[600];

    (void)state;
    make("");
    assert_true(certificates_make(&files));
    snprintf(config, sizeof(config), "tls { cert_file: \"%s\", key_file: \"%s\" }", files.cert,
             files.key);
    nats_configure(&server, config);
    nats_start(&server);
    enters((struct kvp_nats_opts){.tls_ca = files.ca});
    is_refused((struct kvp_nats_opts){.tls_ca = files.other});
    is_refused((struct kvp_nats_opts){.name = "without TLS"});
    nats_kill(&server);

    snprintf(config, sizeof(config),
             "tls { cert_file: \"%s\", key_file: \"%s\", ca_file: \"%s\", verify: true }",
             files.cert, files.key, files.ca);
    nats_configure(&server, config);
    nats_start(&server);
    enters(
        (struct kvp_nats_opts){.tls_ca = files.ca, .tls_cert = files.cert, .tls_key = files.key});
    is_refused((struct kvp_nats_opts){.tls_ca = files.ca});
    certificates_remove(&files);
}

/* ---- a cluster ---- */

static void take(void *arg, const struct kvp_nats_msg *msg)
{
    uint64_t number;

    assert_int_equal(msg->len, sizeof(number));
    memcpy(&number, msg->data, sizeof(number));
    __atomic_store_n((uint64_t *)arg, number, __ATOMIC_RELAXED);
}

/* Of three servers one is killed: publisher and subscriber, which knew only that one, go on with the
 * others, of which the cluster told them. */
static void test_cluster(void **state)
{
    struct kvp_nats *from, *to;
    struct kvp_nats_sub *sub;
    uint64_t last = 0;
    char config[400];

    (void)state;
    make("");
    for (size_t i = 1; i < 3; i++)
        nats_make(&servers[i], "");
    for (size_t i = 0; i < 3; i++) {
        snprintf(config, sizeof(config),
                 "cluster { name: c, listen: 127.0.0.1:%u, routes: [nats://127.0.0.1:%u, "
                 "nats://127.0.0.1:%u, nats://127.0.0.1:%u] }",
                 servers[i].route, servers[0].route, servers[1].route, servers[2].route);
        nats_configure(&servers[i], config);
        nats_start(&servers[i]);
    }
    to = nats_client(&server);
    from = nats_client(&server);
    assert_int_equal(kvp_nats_subscribe(to, "a", 0, take, &last, &sub), 0);
    for (uint64_t i = 1; i < 50 || __atomic_load_n(&last, __ATOMIC_RELAXED) < 50; i++) {
        assert_int_equal(
            kvp_nats_publish(from,
                             &(struct kvp_nats_msg){.subject = "a", .data = &i, .len = sizeof(i)}),
            0);
        usleep(10000); /* meanwhile the servers find each other */
    }
    nats_kill(&server);
    wait_until(nats_connected(to) && stats_of(to).connections > 1);
    wait_until(nats_connected(from) && stats_of(from).connections > 1);
    for (uint64_t i = 1000000; __atomic_load_n(&last, __ATOMIC_RELAXED) < 1000000; i++) {
        assert_int_equal(
            kvp_nats_publish(from,
                             &(struct kvp_nats_msg){.subject = "a", .data = &i, .len = sizeof(i)}),
            0);
        usleep(10000);
    }
    kvp_nats_unsubscribe(sub);
    kvp_nats_close(from, 0);
    kvp_nats_close(to, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_passwords, stop),
        cmocka_unit_test_teardown(test_token, stop),
        cmocka_unit_test_teardown(test_nkey, stop),
        cmocka_unit_test_teardown(test_expired_credential, stop),
        cmocka_unit_test_teardown(test_tls, stop),
        cmocka_unit_test_teardown(test_cluster, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
