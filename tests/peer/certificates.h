// SPDX-License-Identifier: Apache-2.0
/** Certificates for tests of TLS, made by the openssl program. */
#ifndef KV_TEST_PEER_CERTIFICATES_H
#define KV_TEST_PEER_CERTIFICATES_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct certificates {
    char folder[64];
    char ca[96], cert[96], key[96]; /* an authority, and what it has certified for 127.0.0.1 */
    char other[96];                 /* certificate and key in one file, of nobody's authority */
};

static inline bool certificates_run(const struct certificates *c, const char *words)
{
    char command[1024];

    snprintf(command, sizeof(command), "(cd %s && openssl %s) >/dev/null 2>&1", c->folder, words);
    return system(command) == 0; /* NOLINT(cert-env33-c): fixed words */
}

static inline bool certificates_make(struct certificates *c)
{
    snprintf(c->folder, sizeof(c->folder), "/tmp/kvbm-test-%d-XXXXXX", (int)getpid());
    if (!mkdtemp(c->folder))
        return false;
    snprintf(c->ca, sizeof(c->ca), "%s/ca.pem", c->folder);
    snprintf(c->cert, sizeof(c->cert), "%s/cert.pem", c->folder);
    snprintf(c->key, sizeof(c->key), "%s/key.pem", c->folder);
    snprintf(c->other, sizeof(c->other), "%s/other.pem", c->folder);
    return certificates_run(c, "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
                               "-keyout ca.key -out ca.pem -days 2 -subj /CN=authority") &&
           certificates_run(c, "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
                               "-keyout key.pem -out request -subj /CN=node "
                               "-addext subjectAltName=IP:127.0.0.1,DNS:localhost") &&
           certificates_run(c, "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial "
                               "-copy_extensions copy -out cert.pem -days 2") &&
           certificates_run(c, "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
                               "-keyout other.pem -out other.cert -days 2 -subj /CN=other "
                               "-addext subjectAltName=IP:127.0.0.1 && cat other.cert >>other.pem");
}

static inline void certificates_remove(const struct certificates *c)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -r %s", c->folder);
    (void)!system(command); /* NOLINT(cert-env33-c): a folder of our own */
}

#endif
