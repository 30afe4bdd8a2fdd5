// SPDX-License-Identifier: Apache-2.0
/*
 * Parts of libzmq (4.3.4, 4.3.5) that the wheel leaves out: GSSAPI security and the NORM transport.
 *
 * libzmq calls them for sockets with ZMQ_GSSAPI options and for norm:// endpoints, which Kvasir never
 * makes. Each function fails: gss_* with GSS_S_UNAVAILABLE, Norm* with NULL, false or nothing.
 */
#include <stddef.h>
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

#define ABSENT(name, value)                              \
    HIDDEN uintptr_t absent_##name(void) __asm__(#name); \
    uintptr_t absent_##name(void)                        \
    {                                                    \
        return value;                                    \
    }
#define GSS(name) ABSENT(gss_##name, 16u << 16) /* GSS_S_UNAVAILABLE */
#define NORM(name) ABSENT(Norm##name, 0)

NORM(CreateInstance)
NORM(CreateSession)
NORM(DestroyInstance)
NORM(DestroySession)
NORM(GetDescriptor)
NORM(GetNextEvent)
NORM(GetRandomSessionId)
NORM(IsUnicastAddress)
NORM(NodeDelete)
NORM(ObjectGetType)
NORM(ObjectGetUserData)
NORM(ObjectSetUserData)
NORM(SetAutoParity)
NORM(SetCongestionControl)
NORM(SetDefaultSyncPolicy)
NORM(SetDefaultUnicastNack)
NORM(SetEcnSupport)
NORM(SetLoopback)
NORM(SetMulticastInterface)
NORM(SetRxPortReuse)
NORM(SetTOS)
NORM(SetTTL)
NORM(SetTxRate)
NORM(StartReceiver)
NORM(StartSender)
NORM(StopInstance)
NORM(StopReceiver)
NORM(StopSender)
NORM(StreamFlush)
NORM(StreamOpen)
NORM(StreamRead)
NORM(StreamSeekMsgStart)
NORM(StreamSetPushEnable)
NORM(StreamWrite)
GSS(accept_sec_context)
GSS(acquire_cred)
GSS(delete_sec_context)
GSS(display_name)
GSS(import_name)
GSS(init_sec_context)
GSS(release_buffer)
GSS(release_cred)
GSS(release_name)
GSS(unwrap)
GSS(wrap)

/* Constants that libzmq passes to these functions or compares with their results. */
extern HIDDEN const void *const GSS_C_NT_HOSTBASED_SERVICE, *const GSS_C_NT_USER_NAME;
extern HIDDEN const void *const NORM_INSTANCE_INVALID, *const NORM_SESSION_INVALID;
extern HIDDEN const void *const NORM_NODE_INVALID, *const NORM_OBJECT_INVALID;
extern HIDDEN const uint32_t NORM_NODE_ANY;
const void *const GSS_C_NT_HOSTBASED_SERVICE, *const GSS_C_NT_USER_NAME;
const void *const NORM_INSTANCE_INVALID, *const NORM_SESSION_INVALID;
const void *const NORM_NODE_INVALID, *const NORM_OBJECT_INVALID;
const uint32_t NORM_NODE_ANY = UINT32_MAX;
