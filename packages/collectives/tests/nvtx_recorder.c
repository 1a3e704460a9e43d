/* A profiler in 100 lines: NVTX loads it through NVTX_INJECTION64_PATH and it writes one line per range event to the
 * file named by NVTX_RECORD_FILE. The structs are the stable part of the NVTX v3 C interface, declared here so that
 * no NVTX header is needed. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const void *message; /* of type 1 an ASCII string, of type 3 a handle from register_string */
} attributes_t;

typedef void (*function_t)(void);
typedef function_t **function_table_t;

typedef struct {
    size_t struct_size;
    int (*get_module_function_table)(int module, function_table_t *table, unsigned int *size);
} callbacks_t;

enum { EXPORT_TABLE_CALLBACKS = 1, MODULE_CORE2 = 5 };
enum { PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };
enum { PAYLOAD_INT64 = 2, MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };

static FILE *record;

static void *create_domain(const char *name) { return strdup(name); }

static void *register_string(void *domain, const char *string) {
    (void)domain;
    return strdup(string);
}

static void name_category(void *domain, uint32_t category, const char *name) {
    fprintf(record, "category\t%s\t%u\t%s\n", (const char *)domain, category, name);
}

static int push(void *domain, const attributes_t *a) {
    int has_message = a->message_type == MESSAGE_ASCII || a->message_type == MESSAGE_REGISTERED;
    fprintf(record, "push\t%s\t%s\t%u\t%lld\n", (const char *)domain, has_message ? (const char *)a->message : "",
            a->category, a->payload_type == PAYLOAD_INT64 ? (long long)a->payload : -1LL);
    return 0;
}

static int pop(void *domain) {
    fprintf(record, "pop\t%s\n", (const char *)domain);
    fflush(record);
    return 0;
}

static void set(function_table_t table, unsigned int size, unsigned int id, function_t function) {
    if (id < size)
        *table[id] = function;
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    const callbacks_t *callbacks = get_export_table(EXPORT_TABLE_CALLBACKS);
    const char *path = getenv("NVTX_RECORD_FILE");
    function_table_t table = NULL;
    unsigned int size = 0;
    if (!callbacks || !path || !(record = fopen(path, "w")))
        return 0;
    if (!callbacks->get_module_function_table(MODULE_CORE2, &table, &size))
        return 0;
    set(table, size, CREATE_DOMAIN, (function_t)create_domain);
    set(table, size, REGISTER_STRING, (function_t)register_string);
    set(table, size, NAME_CATEGORY, (function_t)name_category);
    set(table, size, PUSH, (function_t)push);
    set(table, size, POP, (function_t)pop);
    return 1;
}
