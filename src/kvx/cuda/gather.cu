// SPDX-License-Identifier: Apache-2.0
#include "kvx/cuda/kernels.cuh"

extern const kvx_kernels kvx_gather_kernels = {KVX_KERNELS_OF(kvx_move_large, KVX_OP_GATHER),
                                               KVX_KERNELS_OF(kvx_move_small, KVX_OP_GATHER),
                                               KVX_KERNELS_OF(kvx_move_pieces, KVX_OP_GATHER)};
