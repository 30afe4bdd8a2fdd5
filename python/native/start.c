// SPDX-License-Identifier: Apache-2.0
/*
 * Entry of the wheel's programs (tools/wheel.py), in place of crt1.o.
 *
 * crt1.o of glibc 2.34 and newer passes no init function, and an older glibc runs no constructor of
 * the program then. This one passes a function that runs them, which newer ones call, too.
 */
#include <stddef.h>

typedef void (*function)(void);
typedef void (*initializer)(int argc, char **argv, char **environment);

extern initializer __init_array_start[] __attribute__((visibility("hidden")));
extern initializer __init_array_end[] __attribute__((visibility("hidden")));
int main(int argc, char **argv);
int __libc_start_main(int (*main_function)(int, char **), int argc, char **argv, initializer init,
                      function fini, function rtld_fini, void *stack_end);

/* Address that C++ names when it registers destructors; of crtbeginS.o elsewhere. */
__attribute__((visibility("hidden"))) void *__dso_handle = &__dso_handle;

static void init(int argc, char **argv, char **environment)
{
    for (initializer *each = __init_array_start; each < __init_array_end; each++)
        (*each)(argc, argv, environment);
}

/* @stack: argc, argv and the environment, as the kernel leaves them. @rtld_fini: of the loader. */
__attribute__((used, visibility("hidden"))) void kv_start(void *stack, function rtld_fini);
void kv_start(void *stack, function rtld_fini)
{
    __libc_start_main(main, (int)*(long *)stack, (char **)stack + 1, init, NULL, rtld_fini, stack);
}

#if defined(__x86_64__)
__asm__(".text\n.globl _start\n.type _start, @function\n_start:\n"
        "xor %ebp, %ebp\nmov %rsp, %rdi\nmov %rdx, %rsi\nand $-16, %rsp\ncall kv_start\nhlt\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl _start\n.type _start, %function\n_start:\n"
        "mov x29, #0\nmov x30, #0\nmov x1, x0\nmov x0, sp\nbl kv_start\nbrk #0\n");
#else
#error "no entry for this architecture"
#endif
