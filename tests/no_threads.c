// SPDX-License-Identifier: Apache-2.0
/* Preloaded into the tests of single_threaded.cmake: end the program when it starts a thread. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *arg)
{
    (void)thread;
    (void)attributes;
    (void)run;
    (void)arg;
    fputs("This test starts a thread: take it out of tests/single_threaded.cmake, so that the "
          "thread sanitizer runs it.\n",
          stderr);
    abort();
}
