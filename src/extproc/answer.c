// SPDX-License-Identifier: Apache-2.0
#include "extproc/answer.h"

#include <stdio.h>

#include "ext_proc.pb-c.h"

static void send_response(struct kg_call *call, const Kx__ProcessingResponse *response)
{
    uint8_t *room = kg_call_send(call, kx__processing_response__get_packed_size(response));

    if (room)
        kx__processing_response__pack(response, room);
}

static ProtobufCBinaryData bytes(const char *text)
{
    return (ProtobufCBinaryData){.len = strlen(text), .data = (uint8_t *)text};
}

static void fill_header(Kx__HeaderValueOption *option, Kx__HeaderValue *header, const char *key,
                        const char *value)
{
    kx__header_value__init(header);
    header->key = bytes(key);
    header->raw_value = bytes(value);
    kx__header_value_option__init(option);
    option->header = header;
    option->append_action = 2; /* overwrite or add: a client can't choose its worker */
}

/* {"envoy.lb": {"x-gateway-destination-endpoint": endpoints}} */
struct metadata {
    Kx__TextValue value;
    Kx__TextStruct__FieldsEntry entry, *entries[1];
    Kx__TextStruct inner;
    Kx__NamespaceValue outer;
    Kx__DynamicMetadata__FieldsEntry namespace, *namespaces[1];
    Kx__DynamicMetadata all;
};

static void fill_metadata(struct metadata *m, const char *endpoints)
{
    kx__text_value__init(&m->value);
    m->value.kind_case = KX__TEXT_VALUE__KIND_STRING_VALUE;
    m->value.string_value = (char *)endpoints;
    kx__text_struct__fields_entry__init(&m->entry);
    m->entry.key = (char *)KX_DESTINATION;
    m->entry.value = &m->value;
    m->entries[0] = &m->entry;
    kx__text_struct__init(&m->inner);
    m->inner.n_fields = 1;
    m->inner.fields = m->entries;
    kx__namespace_value__init(&m->outer);
    m->outer.kind_case = KX__NAMESPACE_VALUE__KIND_STRUCT_VALUE;
    m->outer.struct_value = &m->inner;
    kx__dynamic_metadata__fields_entry__init(&m->namespace);
    m->namespace.key = (char *)KX_NAMESPACE;
    m->namespace.value = &m->outer;
    m->namespaces[0] = &m->namespace;
    kx__dynamic_metadata__init(&m->all);
    m->all.n_fields = 1;
    m->all.fields = m->namespaces;
}

void kx_answer_headers(struct kg_call *call, enum kx_side side, const char *endpoints)
{
    Kx__ProcessingResponse response = KX__PROCESSING_RESPONSE__INIT;
    Kx__HeadersResponse headers = KX__HEADERS_RESPONSE__INIT;
    Kx__CommonResponse common = KX__COMMON_RESPONSE__INIT;
    Kx__HeaderMutation mutation = KX__HEADER_MUTATION__INIT;
    Kx__HeaderValueOption option, *options[] = {&option};
    Kx__HeaderValue value;
    struct metadata metadata;

    if (endpoints) {
        fill_header(&option, &value, KX_DESTINATION, endpoints);
        mutation.n_set_headers = 1;
        mutation.set_headers = options;
        common.header_mutation = &mutation;
        common.clear_route_cache = 1; /* routes may match the header */
        headers.response = &common;
        fill_metadata(&metadata, endpoints);
        response.dynamic_metadata = &metadata.all;
    }
    if (side == KX_REQUEST) {
        response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_REQUEST_HEADERS;
        response.request_headers = &headers;
    } else {
        response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_RESPONSE_HEADERS;
        response.response_headers = &headers;
    }
    send_response(call, &response);
}

static void send_body(struct kg_call *call, enum kx_side side, Kx__CommonResponse *common)
{
    Kx__ProcessingResponse response = KX__PROCESSING_RESPONSE__INIT;
    Kx__BodyResponse body = KX__BODY_RESPONSE__INIT;

    body.response = common;
    if (side == KX_REQUEST) {
        response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_REQUEST_BODY;
        response.request_body = &body;
    } else {
        response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_RESPONSE_BODY;
        response.response_body = &body;
    }
    send_response(call, &response);
}

void kx_answer_stream(struct kg_call *call, enum kx_side side, const void *data, size_t len,
                      bool last)
{
    const uint8_t *p = data;

    if (len == 0 && !last)
        return;
    do {
        size_t n = KV_MIN(len, KX_CHUNK);
        Kx__CommonResponse common = KX__COMMON_RESPONSE__INIT;
        Kx__BodyMutation mutation = KX__BODY_MUTATION__INIT;
        Kx__StreamedBodyResponse chunk = KX__STREAMED_BODY_RESPONSE__INIT;

        chunk.body = (ProtobufCBinaryData){.len = n, .data = (uint8_t *)p};
        len -= n;
        p += n;
        chunk.end_of_stream = last && len == 0;
        mutation.mutation_case = KX__BODY_MUTATION__MUTATION_STREAMED_RESPONSE;
        mutation.streamed_response = &chunk;
        common.body_mutation = &mutation;
        send_body(call, side, &common);
    } while (len > 0);
}

void kx_answer_body(struct kg_call *call, enum kx_side side)
{
    send_body(call, side, NULL);
}

void kx_answer_trailers(struct kg_call *call, enum kx_side side)
{
    Kx__ProcessingResponse response = KX__PROCESSING_RESPONSE__INIT;
    Kx__TrailersResponse trailers = KX__TRAILERS_RESPONSE__INIT;

    if (side == KX_REQUEST) {
        response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_REQUEST_TRAILERS;
        response.request_trailers = &trailers;
    } else {
        response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_RESPONSE_TRAILERS;
        response.response_trailers = &trailers;
    }
    send_response(call, &response);
}

void kx_answer_refusal(struct kg_call *call, unsigned status, const char *text)
{
    Kx__ProcessingResponse response = KX__PROCESSING_RESPONSE__INIT;
    Kx__ImmediateResponse refusal = KX__IMMEDIATE_RESPONSE__INIT;
    Kx__HttpStatus code = KX__HTTP_STATUS__INIT;
    Kx__HeaderMutation mutation = KX__HEADER_MUTATION__INIT;
    Kx__HeaderValueOption option, *options[] = {&option};
    Kx__HeaderValue value;
    char body[256];

    fill_header(&option, &value, "content-type", "application/json");
    mutation.n_set_headers = 1;
    mutation.set_headers = options;
    code.code = status;
    snprintf(body, sizeof(body), "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"code\":%u}}",
             text, status == 429 ? "rate_limit_error" : "server_error", status);
    refusal.status = &code;
    refusal.headers = &mutation;
    refusal.body = bytes(body);
    refusal.details = (char *)"kvasir";
    response.response_case = KX__PROCESSING_RESPONSE__RESPONSE_IMMEDIATE_RESPONSE;
    response.immediate_response = &refusal;
    send_response(call, &response);
}
