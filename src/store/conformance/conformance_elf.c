// SPDX-License-Identifier: Apache-2.0
/* List the exported symbols of a shared object from its file: .dynsym, as the loader sees it. The
 * loader has accepted the file already; all lengths are checked nevertheless. */
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/conformance/conformance.h"

struct image {
    const uint8_t *bytes;
    size_t len;
};

static bool is_inside(const struct image *image, uint64_t offset, uint64_t len)
{
    return offset <= image->len && len <= image->len - offset;
}

/* True for symbols that a backend may export, and those that linkers add to every library. */
static bool is_allowed(const char *name)
{
    static const char *const ALLOWED[] = {
        KV_STORE_VTABLE_SYMBOL, KV_STORE_EXT_SYMBOL, "_init", "_fini", "_edata", "_end",
        "__bss_start"};

    for (size_t i = 0; i < KV_COUNT(ALLOWED); i++)
        if (strcmp(name, ALLOWED[i]) == 0)
            return true;
    return strncmp(name, "__gcov_", 7) == 0 || strncmp(name, "__odr_asan", 10) == 0;
}

static bool is_exported(const Elf64_Sym *symbol)
{
    unsigned char type = ELF64_ST_TYPE(symbol->st_info), bind = ELF64_ST_BIND(symbol->st_info);
    unsigned char seen = ELF64_ST_VISIBILITY(symbol->st_other);

    return symbol->st_shndx != SHN_UNDEF && symbol->st_shndx != SHN_ABS && bind != STB_LOCAL &&
           type != STT_SECTION && type != STT_FILE &&
           (seen == STV_DEFAULT || seen == STV_PROTECTED);
}

static int walk(const struct image *image, const Elf64_Shdr *symbols, const Elf64_Shdr *strings,
                char *ret, size_t size)
{
    const char *names = (const char *)image->bytes + strings->sh_offset;
    size_t used = 0;
    int n = 0;

    if (!is_inside(image, symbols->sh_offset, symbols->sh_size) ||
        !is_inside(image, strings->sh_offset, strings->sh_size) || strings->sh_size == 0 ||
        names[strings->sh_size - 1] != '\0')
        return -EINVAL;
    ret[0] = '\0';
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols->sh_size; at += sizeof(Elf64_Sym)) {
        Elf64_Sym symbol;

        memcpy(&symbol, image->bytes + symbols->sh_offset + at, sizeof(symbol));
        if (!is_exported(&symbol) || symbol.st_name >= strings->sh_size ||
            is_allowed(names + symbol.st_name))
            continue;
        if (used < size)
            used += (size_t)snprintf(ret + used, size - used, "%s%s", n ? ", " : "",
                                     names + symbol.st_name);
        n++;
    }
    return n;
}

static int find(const struct image *image, char *ret, size_t size)
{
    Elf64_Ehdr head;
    Elf64_Shdr symbols, strings;

    if (image->len < sizeof(head))
        return -EINVAL;
    memcpy(&head, image->bytes, sizeof(head));
    if (memcmp(head.e_ident, ELFMAG, SELFMAG) != 0 || head.e_ident[EI_CLASS] != ELFCLASS64 ||
        head.e_shentsize != sizeof(Elf64_Shdr) ||
        !is_inside(image, head.e_shoff, (uint64_t)head.e_shnum * sizeof(Elf64_Shdr)))
        return -ENOTSUP;
    for (unsigned i = 0; i < head.e_shnum; i++) {
        memcpy(&symbols, image->bytes + head.e_shoff + i * sizeof(symbols), sizeof(symbols));
        if (symbols.sh_type != SHT_DYNSYM || symbols.sh_link >= head.e_shnum)
            continue;
        memcpy(&strings, image->bytes + head.e_shoff + symbols.sh_link * sizeof(strings),
               sizeof(strings));
        return walk(image, &symbols, &strings, ret, size);
    }
    return -ENOTSUP;
}

int kvs_conf_exports(const char *path, char *ret, size_t size)
{
    struct image image;
    struct stat st;
    void *memory = MAP_FAILED;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc;

    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) == 0 && st.st_size > 0)
        memory = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return -EIO;
    image = (struct image){.bytes = memory, .len = (size_t)st.st_size};
    rc = find(&image, ret, size);
    munmap(memory, image.len);
    return rc;
}
