// SPDX-License-Identifier: Apache-2.0
/** --ext-proc: choices for Envoy's external processing (src/extproc), from the books of the HTTP API. */
#ifndef KV_SELECTOR_ENVOY_H
#define KV_SELECTOR_ENVOY_H

#include "base/core/buf.h"
#include "base/core/error.h"

struct ksel;
struct ksel_envoy;

/** Check the options of --ext-proc. Returns 0, or -EINVAL with @error. */
struct ksel_options;
int ksel_envoy_check(const struct ksel_options *options, struct kv_error *error);

/** Serve s->options->ext_proc; NULL: nothing. Sets s->envoy. Returns 0 or a negative errno with @error. */
int ksel_envoy_start(struct ksel *s, struct kv_error *error);

/** Stop to serve, if it runs: streams get some seconds to end, and free their bookings. */
void ksel_envoy_end(struct ksel *s);
/** Free it, after ksel_envoy_end where it runs. */
void ksel_envoy_stop(struct ksel *s);

/** Append the metrics, if it runs. */
void ksel_envoy_render(struct ksel *s, struct kv_buf *out);

#endif
