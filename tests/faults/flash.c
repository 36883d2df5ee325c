/* Preloaded into a run: its flash fails on command. The file that FLASH_FAULTS names is mapped; its first byte says what reads of a
 * file called bundles.bin do from now on:
 *
 *   .  nothing special    e  EIO    s  at most one page at a time    z  nothing, as if the file had ended    f  one bit is wrong
 *
 * io_uring reads past this library, so it is refused as an app sandbox refuses it, and the reader's threads take over. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096 };

static const volatile char *command = ".";

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("FLASH_FAULTS");
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapping = file < 0 ? MAP_FAILED : mmap(NULL, 1, PROT_READ, MAP_SHARED, file, 0);
    if (mapping != MAP_FAILED)
        command = mapping;
    if (file >= 0)
        close(file);
}

static int is_flash(int file)
{
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, name, sizeof name - 1);
    name[length > 0 ? length : 0] = 0;
    return strstr(name, "/bundles.bin") != NULL;
}

ssize_t pread64(int file, void *target, size_t bytes, off64_t offset)
{
    const char order = *command == '.' || !is_flash(file) ? '.' : *command;
    if (order == 'e') {
        errno = EIO;
        return -1;
    }
    if (order == 'z')
        return 0;
    const ssize_t got = syscall(SYS_pread64, file, target, order == 's' && bytes > PAGE ? PAGE : bytes, offset);
    if (order == 'f' && got > 0)
        ((unsigned char *)target)[got / 2] ^= 4;
    return got;
}

ssize_t pread(int file, void *target, size_t bytes, off_t offset)
{
    return pread64(file, target, bytes, offset);
}

long syscall(long number, ...)
{
    static long (*real)(long, ...);
    long words[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_io_uring_setup) {
        errno = EPERM;
        return -1;
    }
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
