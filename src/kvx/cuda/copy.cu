// SPDX-License-Identifier: Apache-2.0
#include "kvx/cuda/kernels.cuh"

extern const kvx_kernels kvx_copy_kernels = {{(const void *)&kvx_move_large<KVX_OP_COPY, 0, 0>},
                                             {(const void *)&kvx_move_small<KVX_OP_COPY, 0, 0>},
                                             KVX_KERNELS_OF(kvx_move_pieces, KVX_OP_COPY)};
