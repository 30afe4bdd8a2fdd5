// SPDX-License-Identifier: Apache-2.0
/* A library that has a plugin's name, and nothing of one. */
int kv_store_get_table(void);

int kv_store_get_table(void)
{
    return 0;
}
