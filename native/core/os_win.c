/* os_win.c — Windows side of os.h. */
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

#include "os.h"

void *cb_os_map(uint64_t bytes, int lock, struct cb_err *err)
{
    if (bytes == 0 || bytes > SIZE_MAX / 2) {
        cb_fail(err, CB_EINVAL, "cannot map %llu bytes", (unsigned long long)bytes);
        return NULL;
    }
    void *p = VirtualAlloc(NULL, (SIZE_T)bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (p == NULL) {
        cb_fail(err, CB_EIO, "mapping %llu bytes of memory: error %lu",
                (unsigned long long)bytes, (unsigned long)GetLastError());
        return NULL;
    }
    if (lock) {
        /* VirtualLock is bounded by the working set: raise it first. */
        SIZE_T lo = 0, hi = 0;
        HANDLE self = GetCurrentProcess();
        if (GetProcessWorkingSetSize(self, &lo, &hi))
            SetProcessWorkingSetSize(self, lo + (SIZE_T)bytes, hi + (SIZE_T)bytes);
        if (!VirtualLock(p, (SIZE_T)bytes)) {
            cb_fail(err, CB_EIO, "locking %llu bytes of memory: error %lu; leave out --lock",
                    (unsigned long long)bytes, (unsigned long)GetLastError());
            VirtualFree(p, 0, MEM_RELEASE);
            return NULL;
        }
    }
    for (uint64_t i = 0; i < bytes; i += 4096)
        ((volatile unsigned char *)p)[i] = 0;
    return p;
}

void cb_os_unmap(void *p, uint64_t bytes)
{
    (void)bytes;
    if (p != NULL)
        VirtualFree(p, 0, MEM_RELEASE);
}

uint64_t cb_os_mem_available(void)
{
    MEMORYSTATUSEX m;
    m.dwLength = sizeof m;
    return GlobalMemoryStatusEx(&m) ? (uint64_t)m.ullAvailPhys : UINT64_MAX;
}

uint32_t cb_os_physical_cores(void)
{
    static const DWORD max_bytes = 64 * 1024;
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION *info = NULL;
    DWORD bytes = max_bytes;
    uint32_t cores = 0;
    info = VirtualAlloc(NULL, max_bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (info != NULL && GetLogicalProcessorInformation(info, &bytes))
        for (DWORD i = 0; i < bytes / sizeof *info; i++)
            cores += info[i].Relationship == RelationProcessorCore;
    if (info != NULL)
        VirtualFree(info, 0, MEM_RELEASE);
    return cores > 0 ? cores : 1;
}

uint64_t cb_os_now_ns(void)
{
    LARGE_INTEGER f, c;
    QueryPerformanceFrequency(&f);
    QueryPerformanceCounter(&c);
    uint64_t hz = (uint64_t)f.QuadPart, t = (uint64_t)c.QuadPart;
    return t / hz * 1000000000u + t % hz * 1000000000u / hz;
}

int cb_os_open(struct cb_os_file *f, const char *path, struct cb_err *err)
{
    wchar_t wide[1024];
    LARGE_INTEGER size;
    f->h = -1;
    f->size = 0;
    if (MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, 1024) == 0)
        return cb_fail(err, CB_EIO, "opening %s: the path is not UTF-8 or too long", path);
    HANDLE h = CreateFileW(wide, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING,
                           FILE_ATTRIBUTE_NORMAL, NULL);
    if (h == INVALID_HANDLE_VALUE)
        return cb_fail(err, CB_EIO, "opening %s: error %lu", path,
                       (unsigned long)GetLastError());
    if (!GetFileSizeEx(h, &size)) {
        CloseHandle(h);
        return cb_fail(err, CB_EIO, "%s is not a regular file", path);
    }
    f->h = (intptr_t)h;
    f->size = (uint64_t)size.QuadPart;
    return 0;
}

int cb_os_pread(const struct cb_os_file *f, void *p, uint64_t n, uint64_t offset,
                struct cb_err *err)
{
    unsigned char *dst = p;
    while (n > 0) {
        DWORD piece = n > (1u << 20) ? (1u << 20) : (DWORD)n, got = 0;
        OVERLAPPED at = {0};
        at.Offset = (DWORD)(offset & 0xffffffffu);
        at.OffsetHigh = (DWORD)(offset >> 32);
        if (!ReadFile((HANDLE)f->h, dst, piece, &got, &at) || got == 0)
            return cb_fail(err, CB_EIO, "reading at offset %llu: error %lu",
                           (unsigned long long)offset, (unsigned long)GetLastError());
        dst += got;
        offset += got;
        n -= got;
    }
    return 0;
}

void cb_os_close(struct cb_os_file *f)
{
    if (f->h != -1)
        CloseHandle((HANDLE)f->h);
    f->h = -1;
}

int cb_os_direct(const struct cb_os_file *f, int on)
{
    (void)f;
    return on ? -1 : 0; /* would need a handle of its own; the weights are preloaded here */
}

void cb_os_no_readahead(const struct cb_os_file *f)
{
    (void)f;
}

void cb_os_drop_cache(const struct cb_os_file *f, uint64_t offset, uint64_t n)
{
    (void)f, (void)offset, (void)n;
}

uint64_t cb_os_page(void)
{
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

int cb_os_protect(void *p, uint64_t n, enum cb_os_access access)
{
    static const DWORD prot[] = {PAGE_NOACCESS, PAGE_READONLY, PAGE_READWRITE};
    DWORD old;
    return VirtualProtect(p, (SIZE_T)n, prot[access], &old) ? 0 : -1;
}
#else
typedef int cb_os_win_is_empty_here;
#endif
