// SPDX-License-Identifier: Apache-2.0
/* Print what an engine publishes: cc -std=gnu11 subscribe_events.c $(pkg-config --cflags --libs kvevent libzmq)
 * Arguments: the endpoint, tcp://127.0.0.1:5557, and the tokens of a block. Without them, nothing. */
#include <kv_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <zmq.h>
/* clang-format off */
static const char *const names[] = {"stored", "stored known", "removed", "cleared"};
int main(int argc, char **argv)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = argc > 2 ? atoi(argv[2]) : 16};
    void *sub = zmq_socket(zmq_ctx_new(), ZMQ_SUB);
    struct kve_reader *reader;
    struct kve_batch batch;
    zmq_msg_t frame; /* topic and number come first, then the batch */
    if (argc < 2 || kve_reader_create(&opts, &reader) ||
        zmq_setsockopt(sub, ZMQ_SUBSCRIBE, "", 0) || zmq_connect(sub, argv[1]))
        return argc > 1;
    for (zmq_msg_init(&frame); zmq_msg_recv(&frame, sub, 0) >= 0; fflush(stdout)) {
        if (zmq_msg_more(&frame) ||
            kve_reader_decode(reader, zmq_msg_data(&frame), zmq_msg_size(&frame), &batch))
            continue;
        for (const struct kve_op *op = batch.ops; op < batch.ops + batch.n_ops; op++)
            printf("rank %u: %s %zu blocks\n", op->rank, names[op->type], op->n);
    }
    return 1;
}
