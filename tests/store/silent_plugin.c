// SPDX-License-Identifier: Apache-2.0
/* A library with a plugin's file name and none of its symbols. */
int kv_store_get_table(void);

int kv_store_get_table(void)
{
    return 0;
}
