// SPDX-License-Identifier: Apache-2.0
/**
 * Lua scripts: steps that the server must do atomically.
 *
 * USE: if the value under KEY has our trailer, set its time of use to now. Sweeps decide by that
 * time, which only grows. The server's own idle time is unsuitable: it stops while a child process
 * saves to disk, and restarts on a replica after a fail-over.
 */
#ifndef KV_REDIS_SCRIPTS_H
#define KV_REDIS_SCRIPTS_H

#include "redis/entry.h"

/* Before Redis 5 a script that asks for the time must call replicate_commands before it writes. */
#define RDS_LUA_USE                                                                            \
    "if redis.replicate_commands then redis.replicate_commands() end "                         \
    "local now = tonumber(redis.call('TIME')[1]) "                                             \
    "local function use(key) "                                                                 \
    "local tail = redis.pcall('GETRANGE', key, -40, -1) "                                      \
    "if type(tail) ~= 'string' or #tail < 40 or string.sub(tail, 9, 16) ~= '" RDS_CHUNK_MAGIC  \
    "' then return false end "                                                                 \
    "if (tonumber(string.sub(tail, 1, 8), 16) or 0) < now then "                               \
    "redis.call('SETRANGE', key, redis.call('STRLEN', key) - 40, string.format('%08x', now)) " \
    "end return true end "

/* KEYS: chunks, then the manifest if any, then for one with a note the set of chunks that it may
 * need. ARGV: the number of chunks, the offset of the hex in their keys, hex of further chunks that
 * it may need, and last the manifest's value. Returns the time and the numbers (from 1) of missing
 * chunks; sets the manifest when none is missing. */
#define RDS_LUA_PUBLISH                                                                         \
    RDS_LUA_USE                                                                                 \
    "local reply, n, names = {now}, tonumber(ARGV[1]), {''} "                                   \
    "for i = 1, n do if not use(KEYS[i]) then reply[#reply + 1] = i end end "                   \
    "if #reply > 1 or #KEYS == n then return reply end "                                        \
    "local function need(name) names[#names + 1] = name "                                       \
    "if #names == 1000 then redis.call('SADD', KEYS[n + 2], unpack(names)) names = {} end end " \
    "if #KEYS > n + 1 then "                                                                    \
    "for i = 1, n do need(string.sub(KEYS[i], ARGV[2])) end "                                   \
    "for i = 3, #ARGV - 1 do need(ARGV[i]) end "                                                \
    "if #names > 0 then redis.call('SADD', KEYS[n + 2], unpack(names)) end end "                \
    "redis.call('SET', KEYS[n + 1], ARGV[#ARGV]) return reply"

/* Use one chunk. Returns the time, negative when the chunk is missing. */
#define RDS_LUA_USE_ONE RDS_LUA_USE "return use(KEYS[1]) and now or -now"

/* Delete KEYS[1] unless it was used at ARGV[1] or later (negative: in any case). Values
 * of other programs have no time, and stay unless ARGV[1] is negative. Returns the bytes of the
 * content, -1: it was missing, -2: it stays. */
#define RDS_LUA_SWEEP                                                              \
    "local tail = redis.pcall('GETRANGE', KEYS[1], -40, -1) "                      \
    "if type(tail) ~= 'string' then return -2 end "                                \
    "if tail == '' then return -1 end "                                            \
    "local cutoff, behind = tonumber(ARGV[1]), 0 "                                 \
    "if string.sub(tail, -32, -25) == '" RDS_CHUNK_MAGIC "' then behind = 40 end " \
    "if cutoff >= 0 and (behind == 0 or "                                          \
    "(tonumber(string.sub(tail, 1, 8), 16) or 0) >= cutoff) then return -2 end "   \
    "local len = redis.call('STRLEN', KEYS[1]) - behind "                          \
    "redis.call('DEL', KEYS[1]) return len < 0 and 0 or len"

/* Delete KEYS[1] if it still holds ARGV[1], apart from the stamp. */
#define RDS_LUA_DROP                                                         \
    "local is, was = redis.call('GET', KEYS[1]), ARGV[1] "                   \
    "if is and #is == #was and string.sub(is, -32) == string.sub(was, -32) " \
    "and string.sub(is, 1, -41) == string.sub(was, 1, -41) then "            \
    "return redis.call('DEL', KEYS[1]) end return 0"

#endif
