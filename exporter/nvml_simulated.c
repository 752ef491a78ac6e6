/* A simulated NVIDIA driver library.
 *
 * It stands where libnvidia-ml.so.1 stands and answers the same calls with the same structures and
 * return codes, so that whatever reads NVML runs unchanged on it. What it answers comes from a
 * scenario file (format: scenarios.py beside this file), named by gpuwarden_simulated_scenario() or
 * by $GPUWARDEN_SIMULATED_SCENARIO; the file is read again whenever it is replaced.
 *
 * A process of the scenario is a real one: it counts while its pid is alive with its start time.
 * After its death its memory stays for a while (linger), as a driver takes its time to free it.
 * Where there is a folder FILE.devices, a stand-in for each card's device file is kept open in it.
 * When each process died is shared by all users of the scenario through FILE.state, so that
 * exporter, agent and tests see the same. How many calls all of them made is counted there too.
 */

#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    MAX_CARDS = 64,
    MAX_PROCESSES = 8192,
    MAX_ENTRIES = 16384,
    MAX_RULES = 512,
    MAX_WORDS = 32,
    MAX_LINE = 2048,
    MAX_CALL = 64,
    MAX_INSTANCES = MAX_CARDS * 8,
    MAX_XIDS = 256,
    MAX_SETS = 8,
};

/* How long an evaluated state is used again: one snapshot makes dozens of calls. */
static const int64_t REFRESH_NS = 5 * 1000 * 1000;
/* The driver samples processes six times a second. */
static const unsigned long long SAMPLE_US = 166667;

typedef enum { COMPUTE, GRAPHICS, MPS } kind_t;

typedef struct {
    unsigned index;
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    char pci[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
    unsigned long long memory, reserved, used, energy, throttle, corrected, uncorrected;
    unsigned long long pcie_receive, pcie_transmit, nvlink_receive, nvlink_transmit;
    long utilization, activity, power; /* -1: follows from the processes */
    long long told_used;               /* -1: what adds up */
    unsigned pcie_bits;
    unsigned temperature, limit, minor, mig, compute_mode, persistence, sm_clock, memory_clock;
    unsigned gpm, tensor;
} card_t;

typedef struct {
    unsigned card; /* index of the card */
    unsigned pid;
    unsigned long long start; /* 0: bound to whatever has the pid when first seen */
    unsigned long long memory;
    unsigned sm, mem;
    double linger, sample_age;
    unsigned after;
    int has_after, ghost;
    kind_t kind;
    unsigned gi, ci; /* NO_INSTANCE: on the card itself */
    /* evaluated */
    int listed, alive;
} process_t;

static const unsigned NO_INSTANCE = 0xFFFFFFFF;

/* A MIG instance. */
typedef struct {
    unsigned card, gi, ci;
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    char profile[32];
    unsigned long long memory, used;
    unsigned tensor;
} instance_t;

/* How often an error has happened on a card. */
typedef struct {
    unsigned card, code;
    unsigned long long count;
} xid_t;

typedef struct {
    char call[MAX_CALL];
    int card; /* -1: every card, and calls that concern none */
    int code;
    unsigned count; /* with code 0, of rows that are not there */
    long times;     /* -1: always */
    double milliseconds;
} rule_t;

/* One line of FILE.state. */
typedef struct {
    uint32_t pid, used;
    uint64_t key_start, start;
    int64_t died; /* CLOCK_BOOTTIME ns, 0 while alive */
} entry_t;

typedef struct {
    uint64_t magic;
    entry_t entries[MAX_ENTRIES];
    uint64_t calls; /* by all users of the scenario; simulated.py reads it here */
} shared_t;

static const uint64_t MAGIC = 0x6770757764656e31ULL;

struct nvmlDevice_st {
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
};

/* What a set has delivered of each error on its cards. */
struct nvmlEventSet_st {
    int used;
    nvmlDevice_t devices[MAX_CARDS];
    unsigned device_count, known_count;
    struct {
        nvmlDevice_t device;
        unsigned code;
        unsigned long long count;
    } known[MAX_XIDS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;
static char scenario_path[4096];
static struct stat scenario_seen;
static int scenario_loaded;
static int64_t refreshed;

static char driver[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
static card_t cards[MAX_CARDS];
static unsigned card_count;
static process_t processes[MAX_PROCESSES];
static unsigned process_count;
static rule_t faults[MAX_RULES], delays[MAX_RULES];
static unsigned fault_count, delay_count;
static instance_t instances[MAX_INSTANCES];
static unsigned instance_count;
static xid_t xids[MAX_XIDS];
static unsigned xid_count;
static unsigned row_bytes; /* of a process in lists of the third version */

static struct nvmlEventSet_st sets[MAX_SETS];
static struct nvmlDevice_st handles[MAX_CARDS * 16];
static unsigned handle_count;

static shared_t *shared;
static int shared_file = -1;

/* Stand for /dev/nvidia*: open for as long as a driver would keep its device files open. */
static int device_files[MAX_CARDS];
static unsigned device_file_count;

static int64_t boottime(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static unsigned long long walltime_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

/* ------------------------------------------------------------------------------------------- */
/* The scenario file */

typedef struct {
    char *key, *value;
} word_t;

/* Split `kind key=value key="quoted value"` in place; returns the number of pairs. */
static int split(char *line, char **kind, word_t *words) {
    int count = 0;
    char *at = line;
    *kind = NULL;
    for (;;) {
        while (isspace((unsigned char)*at)) at++;
        if (*at == '\0' || *at == '#') return count;
        char *begin = at;
        while (*at != '\0' && *at != '=' && !isspace((unsigned char)*at)) at++;
        if (*at != '=') {
            if (*at != '\0') *at++ = '\0';
            if (*kind == NULL) *kind = begin;
            continue;
        }
        *at++ = '\0';
        char *value = at;
        if (*at == '"') {
            char *out = value = ++at;
            while (*at != '\0' && *at != '"') {
                if (*at == '\\' && at[1] != '\0') at++;
                if (*at == 'x' && at[-1] == '\\' && isxdigit((unsigned char)at[1]) &&
                    isxdigit((unsigned char)at[2])) {
                    char digits[3] = {at[1], at[2], '\0'};
                    *out++ = (char)strtoul(digits, NULL, 16);
                    at += 3;
                    continue;
                }
                *out++ = *at++;
            }
            if (*at != '\0') at++;
            *out = '\0';
        } else {
            while (*at != '\0' && !isspace((unsigned char)*at)) at++;
            if (*at != '\0') *at++ = '\0';
        }
        if (count < MAX_WORDS) words[count++] = (word_t){begin, value};
    }
}

static const char *word(const word_t *words, int count, const char *key) {
    for (int i = 0; i < count; i++)
        if (strcmp(words[i].key, key) == 0) return words[i].value;
    return NULL;
}

static long long number(const word_t *words, int count, const char *key, long long otherwise) {
    const char *text = word(words, count, key);
    if (text == NULL) return otherwise;
    if (strcmp(text, "na") == 0) return -1;
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 0);
    return (errno != 0 || *end != '\0') ? otherwise : value;
}

static double real(const word_t *words, int count, const char *key, double otherwise) {
    const char *text = word(words, count, key);
    char *end;
    if (text == NULL) return otherwise;
    double value = strtod(text, &end);
    return *end != '\0' ? otherwise : value;
}

static void copy(char *target, size_t size, const char *text) {
    snprintf(target, size, "%s", text == NULL ? "" : text);
}

static void add_card(const word_t *words, int count) {
    if (card_count >= MAX_CARDS) return;
    card_t *card = &cards[card_count];
    memset(card, 0, sizeof *card);
    card->index = (unsigned)number(words, count, "index", card_count);
    const char *name = word(words, count, "name"), *pci = word(words, count, "pci");
    const char *uuid = word(words, count, "uuid");
    /* What is not given is as scenarios.py makes it. */
    if (uuid != NULL && *uuid != '\0')
        copy(card->uuid, sizeof card->uuid, uuid);
    else
        snprintf(card->uuid, sizeof card->uuid, "GPU-%08x-0000-4000-8000-%012x", card->index,
                 card->index);
    copy(card->name, sizeof card->name, name != NULL ? name : "NVIDIA A100-SXM4-40GB");
    if (pci != NULL)
        copy(card->pci, sizeof card->pci, pci);
    else
        snprintf(card->pci, sizeof card->pci, "00000000:%02X:00.0", (0x10 + card->index) & 0xff);
    card->memory = (unsigned long long)number(words, count, "memory", 40LL << 30);
    card->reserved = (unsigned long long)number(words, count, "reserved", 512LL << 20);
    card->used = (unsigned long long)number(words, count, "used", 0);
    card->energy = (unsigned long long)number(words, count, "energy", 0);
    card->throttle = (unsigned long long)number(words, count, "throttle", 0);
    card->corrected = (unsigned long long)number(words, count, "ecc_corrected", 0);
    card->uncorrected = (unsigned long long)number(words, count, "ecc_uncorrected", 0);
    card->told_used = number(words, count, "told_used", -1);
    card->utilization = (long)number(words, count, "utilization", -1);
    card->activity = (long)number(words, count, "activity", -1);
    card->power = (long)number(words, count, "power", -1);
    card->temperature = (unsigned)number(words, count, "temperature", 41);
    card->limit = (unsigned)number(words, count, "limit", 400);
    card->minor = (unsigned)number(words, count, "minor", card->index);
    card->mig = (unsigned)number(words, count, "mig", 0);
    card->compute_mode = (unsigned)number(words, count, "compute_mode", NVML_COMPUTEMODE_DEFAULT);
    card->persistence = (unsigned)number(words, count, "persistence", 1);
    card->sm_clock = (unsigned)number(words, count, "sm_clock", 1410);
    card->memory_clock = (unsigned)number(words, count, "memory_clock", 1215);
    card->pcie_receive = (unsigned long long)number(words, count, "pcie_receive", 0);
    card->pcie_transmit = (unsigned long long)number(words, count, "pcie_transmit", 0);
    card->pcie_bits = (unsigned)number(words, count, "pcie_bits", 64);
    card->gpm = (unsigned)number(words, count, "gpm", 0);
    card->tensor = (unsigned)number(words, count, "tensor", 0);
    card->nvlink_receive = (unsigned long long)number(words, count, "nvlink_receive", 0);
    card->nvlink_transmit = (unsigned long long)number(words, count, "nvlink_transmit", 0);
    card_count++;
}

static void add_process(const word_t *words, int count) {
    if (process_count >= MAX_PROCESSES) return;
    process_t *process = &processes[process_count];
    memset(process, 0, sizeof *process);
    const char *kind = word(words, count, "kind");
    process->card = (unsigned)number(words, count, "card", 0);
    process->pid = (unsigned)number(words, count, "pid", 0);
    process->start = (unsigned long long)number(words, count, "start", 0);
    process->memory = (unsigned long long)number(words, count, "memory", 0);
    process->sm = (unsigned)number(words, count, "sm", 0);
    process->mem = (unsigned)number(words, count, "mem", 0);
    process->linger = real(words, count, "linger", 0.0);
    process->sample_age = real(words, count, "sample_age", 0.0);
    process->has_after = word(words, count, "after") != NULL;
    process->after = (unsigned)number(words, count, "after", 0);
    process->ghost = (int)number(words, count, "ghost", 0);
    process->gi = (unsigned)number(words, count, "gi", NO_INSTANCE);
    process->ci = (unsigned)number(words, count, "ci", NO_INSTANCE);
    process->kind = COMPUTE;
    if (kind != NULL && strcmp(kind, "graphics") == 0) process->kind = GRAPHICS;
    if (kind != NULL && strcmp(kind, "mps") == 0) process->kind = MPS;
    process_count++;
}

static void add_instance(const word_t *words, int count) {
    if (instance_count >= MAX_INSTANCES) return;
    instance_t *instance = &instances[instance_count++];
    memset(instance, 0, sizeof *instance);
    instance->card = (unsigned)number(words, count, "card", 0);
    instance->gi = (unsigned)number(words, count, "gi", 0);
    instance->ci = (unsigned)number(words, count, "ci", 0);
    copy(instance->uuid, sizeof instance->uuid, word(words, count, "uuid"));
    const char *profile = word(words, count, "profile");
    copy(instance->profile, sizeof instance->profile, profile != NULL ? profile : "1g.5gb");
    instance->memory = (unsigned long long)number(words, count, "memory", 4864LL << 20);
    instance->used = (unsigned long long)number(words, count, "used", 0);
    instance->tensor = (unsigned)number(words, count, "tensor", 0);
}

static void add_xid(const word_t *words, int count) {
    if (xid_count >= MAX_XIDS) return;
    xids[xid_count++] = (xid_t){
        .card = (unsigned)number(words, count, "card", 0),
        .code = (unsigned)number(words, count, "code", 0),
        .count = (unsigned long long)number(words, count, "count", 1),
    };
}

static void add_rule(rule_t *rules, unsigned *rule_count, const word_t *words, int count) {
    if (*rule_count >= MAX_RULES) return;
    rule_t *rule = &rules[(*rule_count)++];
    const char *call = word(words, count, "call");
    copy(rule->call, sizeof rule->call, call != NULL ? call : "*");
    rule->card = (int)number(words, count, "card", -1);
    rule->code = (int)number(words, count, "code", NVML_ERROR_FUNCTION_NOT_FOUND);
    rule->count = (unsigned)number(words, count, "count", 0);
    rule->times = (long)number(words, count, "times", -1);
    rule->milliseconds = real(words, count, "milliseconds", 0.0);
}

static void load_scenario(FILE *file) {
    static char line[MAX_LINE];
    card_count = process_count = fault_count = delay_count = instance_count = xid_count = 0;
    row_bytes = sizeof(nvmlProcessInfo_t);
    copy(driver, sizeof driver, "550.54.15");
    while (fgets(line, sizeof line, file) != NULL) {
        word_t words[MAX_WORDS];
        char *kind;
        int count = split(line, &kind, words);
        if (kind == NULL) continue;
        if (strcmp(kind, "driver") == 0) {
            if (word(words, count, "version") != NULL)
                copy(driver, sizeof driver, word(words, count, "version"));
            row_bytes = (unsigned)number(words, count, "row_bytes", row_bytes);
        } else if (strcmp(kind, "card") == 0) {
            add_card(words, count);
        } else if (strcmp(kind, "process") == 0) {
            add_process(words, count);
        } else if (strcmp(kind, "mig") == 0) {
            add_instance(words, count);
        } else if (strcmp(kind, "xid") == 0) {
            add_xid(words, count);
        } else if (strcmp(kind, "fault") == 0 || strcmp(kind, "missing") == 0) {
            add_rule(faults, &fault_count, words, count);
        } else if (strcmp(kind, "delay") == 0) {
            add_rule(delays, &delay_count, words, count);
        }
    }
}

/* ------------------------------------------------------------------------------------------- */
/* Which processes live, and since when the others are dead */

/* Start time of a live process in clock ticks, 0 if there is none (or only its remains). */
static unsigned long long alive_since(unsigned pid) {
    char path[64], content[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, content, sizeof content - 1);
    close(file);
    if (length <= 0) return 0;
    content[length] = '\0';
    char *at = strrchr(content, ')'), state;
    unsigned long long start;
    if (at == NULL) return 0;
    int found = sscanf(at + 1,
                       " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d "
                       "%*d %llu",
                       &state, &start);
    if (found != 2 || state == 'Z' || state == 'X') return 0;
    return start;
}

static void open_shared(void) {
    char path[sizeof scenario_path + 8];
    snprintf(path, sizeof path, "%s.state", scenario_path);
    shared_file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0664);
    if (shared_file >= 0) {
        struct stat about;
        flock(shared_file, LOCK_EX);
        int usable = fstat(shared_file, &about) == 0 && S_ISREG(about.st_mode);
        if (usable && (size_t)about.st_size < sizeof *shared)
            usable = ftruncate(shared_file, sizeof *shared) == 0;
        void *memory = MAP_FAILED;
        if (usable)
            memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, shared_file, 0);
        if (memory != MAP_FAILED) {
            shared = memory;
            if (shared->magic != MAGIC) {
                memset(shared, 0, sizeof *shared);
                shared->magic = MAGIC;
            }
        }
        flock(shared_file, LOCK_UN);
        if (shared != NULL) return;
        close(shared_file);
        shared_file = -1;
    }
    /* Where the folder cannot be written, death times are this process's own. */
    shared = calloc(1, sizeof *shared);
}

static void close_shared(void) {
    if (shared == NULL) return;
    if (shared_file >= 0) {
        munmap(shared, sizeof *shared);
        close(shared_file);
    } else {
        free(shared);
    }
    shared = NULL;
    shared_file = -1;
}

static entry_t *entry_of(unsigned pid, unsigned long long key_start) {
    entry_t *unused = NULL, *oldest = NULL;
    for (unsigned i = 0; i < MAX_ENTRIES; i++) {
        entry_t *entry = &shared->entries[(pid + i) % MAX_ENTRIES];
        if (!entry->used) {
            unused = entry;
            break;
        }
        if (entry->pid == pid && entry->key_start == key_start) return entry;
        if (entry->died != 0 && (oldest == NULL || entry->died < oldest->died)) oldest = entry;
    }
    entry_t *entry = unused != NULL ? unused : oldest;
    if (entry == NULL) return NULL;
    *entry = (entry_t){.pid = pid, .used = 1, .key_start = key_start};
    return entry;
}

static void evaluate(process_t *process, int64_t now) {
    process->listed = process->alive = 0;
    if (process->has_after) {
        /* The predecessor's place must be free, and it must have been there. */
        int seen = 0;
        for (unsigned i = 0; i < process_count; i++) {
            if (processes[i].pid != process->after || &processes[i] == process) continue;
            if (processes[i].listed) return;
            seen = 1;
        }
        if (!seen) return;
    }
    if (process->ghost) {
        process->listed = process->alive = 1;
        return;
    }
    entry_t *entry = entry_of(process->pid, process->start);
    if (entry == NULL) return;
    unsigned long long start = entry->died != 0 ? 0 : alive_since(process->pid);
    if (entry->start == 0 && start != 0 && (process->start == 0 || process->start == start))
        entry->start = start;
    if (entry->start == 0) return; /* not yet there, or gone before anybody looked */
    if (entry->died == 0 && start != entry->start) entry->died = now;
    process->alive = entry->died == 0;
    /* A death in the future was noted before a reboot. */
    process->listed = process->alive || (now >= entry->died &&
                                         (double)(now - entry->died) < process->linger * 1e9);
}

/* Bring everything up to date; 0 where there is no scenario to read. */
static int refresh(void) {
    int64_t now = boottime();
    if (scenario_loaded && now - refreshed < REFRESH_NS) return 1;
    struct stat about;
    if (scenario_path[0] == '\0' || stat(scenario_path, &about) != 0) return scenario_loaded;
    if (!scenario_loaded || about.st_ino != scenario_seen.st_ino ||
        about.st_size != scenario_seen.st_size ||
        about.st_mtim.tv_sec != scenario_seen.st_mtim.tv_sec ||
        about.st_mtim.tv_nsec != scenario_seen.st_mtim.tv_nsec) {
        FILE *file = fopen(scenario_path, "re");
        if (file == NULL) return scenario_loaded;
        load_scenario(file);
        fclose(file);
        scenario_seen = about;
        scenario_loaded = 1;
    }
    if (shared == NULL) open_shared();
    if (shared == NULL) return 0;
    if (shared_file >= 0) flock(shared_file, LOCK_EX);
    for (unsigned i = 0; i < process_count; i++)
        if (!processes[i].has_after) evaluate(&processes[i], now);
    for (unsigned i = 0; i < process_count; i++)
        if (processes[i].has_after) evaluate(&processes[i], now);
    if (shared_file >= 0) flock(shared_file, LOCK_UN);
    refreshed = now;
    return 1;
}

/* The instance that a handle means, or NULL: then it means a card. */
static const instance_t *instance_of(nvmlDevice_t device) {
    if (device < handles || device >= handles + handle_count) return NULL;
    for (unsigned i = 0; i < instance_count; i++)
        if (strcmp(instances[i].uuid, device->uuid) == 0) return &instances[i];
    return NULL;
}

/* The card that a handle means, or is an instance of. */
static card_t *card_of(nvmlDevice_t device) {
    if (device < handles || device >= handles + handle_count) return NULL;
    const instance_t *instance = instance_of(device);
    for (unsigned i = 0; i < card_count; i++)
        if (instance != NULL ? cards[i].index == instance->card
                             : strcmp(cards[i].uuid, device->uuid) == 0)
            return &cards[i];
    return NULL;
}

static nvmlDevice_t handle_of(const char *uuid) {
    for (unsigned i = 0; i < handle_count; i++)
        if (strcmp(handles[i].uuid, uuid) == 0) return &handles[i];
    if (handle_count >= sizeof handles / sizeof *handles) return NULL;
    copy(handles[handle_count].uuid, sizeof handles[handle_count].uuid, uuid);
    return &handles[handle_count++];
}

/* ------------------------------------------------------------------------------------------- */
/* The frame of every call */

static int applies(const rule_t *rule, const char *call, const card_t *card) {
    if (rule->card >= 0 && (card == NULL || card->index != (unsigned)rule->card)) return 0;
    size_t length = strlen(rule->call);
    if (length > 0 && rule->call[length - 1] == '*')
        return strncmp(rule->call, call, length - 1) == 0;
    return strcmp(rule->call, call) == 0;
}

static const nvmlReturn_t GO_ON = (nvmlReturn_t)-1;

static unsigned claimed; /* rows, by a fault of code 0 */

/* With the lock held: whether the call may go on, or what it returns instead. */
static nvmlReturn_t begin(const char *call, const card_t *card) {
    double milliseconds = 0.0;
    if (shared != NULL) __atomic_fetch_add(&shared->calls, 1, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < delay_count; i++)
        if (applies(&delays[i], call, card)) milliseconds += delays[i].milliseconds;
    nvmlReturn_t answer = GO_ON;
    for (unsigned i = 0; i < fault_count && answer == GO_ON; i++) {
        if (!applies(&faults[i], call, card) || faults[i].times == 0) continue;
        if (faults[i].times > 0) faults[i].times--;
        answer = (nvmlReturn_t)faults[i].code;
        claimed = faults[i].count;
    }
    if (milliseconds > 0.0) {
        struct timespec rest = {(time_t)(milliseconds / 1e3),
                                (long)(1e6 * (milliseconds - 1e3 * (time_t)(milliseconds / 1e3)))};
        pthread_mutex_unlock(&lock); /* a call that hangs must not hang the others */
        while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
        }
        pthread_mutex_lock(&lock);
    }
    return answer;
}

#define ENTER                                                             \
    pthread_mutex_lock(&lock);                                            \
    nvmlReturn_t answer = NVML_SUCCESS;                                   \
    do {                                                                  \
        if (!initialised) {                                               \
            answer = NVML_ERROR_UNINITIALIZED;                            \
            break;                                                        \
        }                                                                 \
        if (!refresh()) {                                                 \
            answer = NVML_ERROR_DRIVER_NOT_LOADED;                        \
            break;                                                        \
        }

#define ENTER_SYSTEM                                                      \
    ENTER                                                                 \
    if ((answer = begin(__func__, NULL)) != GO_ON) break;                 \
    answer = NVML_SUCCESS;

/* A card that left the scenario while a handle to it is in use is lost. */
#define ENTER_CARD(device)                                                \
    ENTER                                                                 \
    card_t *card = card_of(device);                                       \
    if (card == NULL) {                                                   \
        answer = NVML_ERROR_GPU_IS_LOST;                                  \
        break;                                                            \
    }                                                                     \
    if ((answer = begin(__func__, card)) != GO_ON) break;                 \
    answer = NVML_SUCCESS;                                                \
    if ((card = card_of(device)) == NULL) {                               \
        answer = NVML_ERROR_GPU_IS_LOST;                                  \
        break;                                                            \
    }

#define LEAVE                                                             \
    }                                                                     \
    while (0);                                                            \
    pthread_mutex_unlock(&lock);                                          \
    return answer;

EXPORT void gpuwarden_simulated_scenario(const char *path) {
    pthread_mutex_lock(&lock);
    copy(scenario_path, sizeof scenario_path, path);
    scenario_loaded = 0;
    refreshed = 0;
    close_shared();
    pthread_mutex_unlock(&lock);
}

static nvmlReturn_t text(char *target, unsigned length, const char *value) {
    if (target == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(value) + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(target, value, strlen(value) + 1);
    return NVML_SUCCESS;
}

static void open_devices(void) {
    char folder[sizeof scenario_path + 16], path[sizeof folder + 32];
    snprintf(folder, sizeof folder, "%s.devices", scenario_path);
    if (access(folder, X_OK) != 0) return;
    for (unsigned i = 0; i < card_count; i++) {
        snprintf(path, sizeof path, "%s/nvidia%u", folder, cards[i].minor);
        /* Not close-on-exec: drivers have been seen to forget it. */
        int file = open(path, O_RDONLY | O_CREAT, 0644);
        if (file >= 0) device_files[device_file_count++] = file;
    }
}

static void close_devices(void) {
    while (device_file_count > 0) close(device_files[--device_file_count]);
}

/* Whoever drops the library after a failed init must find nothing of it left. */
__attribute__((destructor)) static void dropped(void) {
    close_devices();
    close_shared();
}

static nvmlReturn_t init(const char *call) {
    pthread_mutex_lock(&lock);
    if (scenario_path[0] == '\0') copy(scenario_path, sizeof scenario_path,
                                       getenv("GPUWARDEN_SIMULATED_SCENARIO"));
    nvmlReturn_t answer = NVML_ERROR_DRIVER_NOT_LOADED;
    if (refresh()) {
        answer = begin(call, NULL);
        if (answer == GO_ON) {
            answer = NVML_SUCCESS;
            if (initialised++ == 0) open_devices();
        }
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

EXPORT nvmlReturn_t nvmlInit(void) { return init(__func__); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return init(__func__); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return init(__func__);
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t answer = initialised > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (initialised > 0) initialised--;
    if (initialised == 0) {
        close_devices();
        close_shared();
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
        case NVML_SUCCESS: return "The operation was successful";
        case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
        case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
        case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
        case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
        case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}

/* ------------------------------------------------------------------------------------------- */
/* System */

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER_SYSTEM
    answer = text(version, length, driver);
    LEAVE
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    ENTER_SYSTEM
    char own[64];
    snprintf(own, sizeof own, "12.%.32s", driver);
    answer = text(version, length, own);
    LEAVE
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER_SYSTEM
    *version = 12040;
    LEAVE
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER_SYSTEM
    *version = 12040;
    LEAVE
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    ENTER_SYSTEM
    char path[64], target[4096];
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t size = readlink(path, target, sizeof target - 1);
    if (size < 0) {
        answer = NVML_ERROR_NOT_FOUND;
        break;
    }
    target[size] = '\0';
    answer = text(name, length, target);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER
    if ((answer = begin(__func__, NULL)) == NVML_SUCCESS) {
        *count = claimed;
        break;
    }
    if (answer != GO_ON) break;
    answer = NVML_SUCCESS;
    *count = card_count;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

static nvmlReturn_t handle_by(const char *call, card_t *card, nvmlDevice_t *device) {
    if (card == NULL) return NVML_ERROR_NOT_FOUND;
    nvmlReturn_t answer = begin(call, card);
    if (answer != GO_ON) return answer;
    *device = handle_of(card->uuid);
    return *device == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    ENTER
    card_t *card = NULL;
    for (unsigned i = 0; i < card_count; i++)
        if (cards[i].index == index) card = &cards[i];
    answer = card == NULL ? NVML_ERROR_INVALID_ARGUMENT : handle_by(__func__, card, device);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER
    card_t *card = NULL;
    for (unsigned i = 0; i < card_count; i++)
        if (strcmp(cards[i].uuid, uuid) == 0) card = &cards[i];
    answer = handle_by(__func__, card, device);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    ENTER
    card_t *card = NULL;
    for (unsigned i = 0; i < card_count; i++)
        if (strcasecmp(cards[i].pci, bus) == 0) card = &cards[i];
    answer = handle_by(__func__, card, device);
    LEAVE
}

/* ------------------------------------------------------------------------------------------- */
/* Identity of a card */

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    ENTER_CARD(device)
    const instance_t *instance = instance_of(device);
    char own[sizeof card->name + sizeof instance->profile + 8];
    snprintf(own, sizeof own, instance != NULL ? "%s MIG %s" : "%s", card->name,
             instance != NULL ? instance->profile : "");
    answer = text(name, length, own);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    ENTER_CARD(device)
    answer = text(uuid, length, device->uuid);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    ENTER_CARD(device)
    *index = card->index;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor) {
    ENTER_CARD(device)
    *minor = card->minor;
    LEAVE
}

static void fill_pci(const card_t *card, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    sscanf(card->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    pci->pciDeviceId = 0x20b010de;
    snprintf(pci->busId, sizeof pci->busId, "%s", card->pci);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff,
             pci->bus & 0xff, pci->device & 0xff);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    ENTER_CARD(device)
    fill_pci(card, pci);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) {
    ENTER_CARD(device)
    *now = *pending = card->mig;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    ENTER_CARD(device)
    *count = card->mig ? 7 : 0;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index,
                                                        nvmlDevice_t *found) {
    ENTER_CARD(device)
    answer = NVML_ERROR_NOT_FOUND;
    for (unsigned i = 0; i < instance_count && card->mig; i++) {
        if (instances[i].card != card->index || index-- != 0) continue;
        *found = handle_of(instances[i].uuid);
        answer = *found == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
        break;
    }
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is) {
    ENTER_CARD(device)
    *is = instance_of(device) != NULL;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device,
                                                                 nvmlDevice_t *parent) {
    ENTER_CARD(device)
    if (instance_of(device) == NULL)
        answer = NVML_ERROR_INVALID_ARGUMENT;
    else
        *parent = handle_of(card->uuid);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_CARD(device)
    const instance_t *instance = instance_of(device);
    if (instance == NULL)
        answer = NVML_ERROR_INVALID_ARGUMENT;
    else
        *id = instance->gi;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    ENTER_CARD(device)
    const instance_t *instance = instance_of(device);
    if (instance == NULL)
        answer = NVML_ERROR_INVALID_ARGUMENT;
    else
        *id = instance->ci;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode) {
    ENTER_CARD(device)
    *mode = card->persistence ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major,
                                                       int *minor) {
    ENTER_CARD(device)
    *major = 8;
    *minor = 0;
    LEAVE
}

/* ------------------------------------------------------------------------------------------- */
/* Load and memory */

static unsigned long long used_memory(const card_t *card) {
    unsigned long long used = card->used;
    for (unsigned i = 0; i < process_count; i++)
        if (processes[i].card == card->index && processes[i].listed &&
            processes[i].memory != (unsigned long long)-1)
            used += processes[i].memory;
    unsigned long long most = card->memory > card->reserved ? card->memory - card->reserved : 0;
    return used < most ? used : most;
}

static unsigned long long instance_used(const instance_t *instance) {
    unsigned long long used = instance->used;
    for (unsigned i = 0; i < process_count; i++)
        if (processes[i].card == instance->card && processes[i].listed &&
            processes[i].gi == instance->gi && processes[i].memory != (unsigned long long)-1)
            used += processes[i].memory;
    return used < instance->memory ? used : instance->memory;
}

static unsigned busy(const card_t *card, int memory) {
    long given = memory ? card->activity : card->utilization;
    if (given >= 0) return (unsigned)given;
    unsigned sum = 0;
    for (unsigned i = 0; i < process_count; i++)
        if (processes[i].card == card->index && processes[i].alive)
            sum += memory ? processes[i].mem : processes[i].sm;
    return sum < 100 ? sum : 100;
}

static unsigned milliwatts(const card_t *card) {
    if (card->power >= 0) return (unsigned)card->power * 1000;
    const unsigned idle = 55000, limit = card->limit * 1000;
    return limit <= idle ? limit : idle + (limit - idle) / 100 * busy(card, 0);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER_CARD(device)
    const instance_t *instance = instance_of(device);
    if (instance != NULL) {
        memory->total = instance->memory;
        memory->used = instance_used(instance);
        memory->free = memory->total - memory->used;
        break;
    }
    memory->total = card->memory;
    memory->used = used_memory(card) + card->reserved;
    memory->free = memory->total - memory->used;
    if (card->told_used >= 0) memory->used = (unsigned long long)card->told_used;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER_CARD(device)
    if (memory->version != nvmlMemory_v2) {
        answer = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
        break;
    }
    const instance_t *instance = instance_of(device);
    if (instance != NULL) {
        memory->total = instance->memory;
        memory->reserved = 0;
        memory->used = instance_used(instance);
        memory->free = memory->total - memory->used;
        break;
    }
    memory->total = card->memory;
    memory->reserved = card->reserved;
    memory->used = used_memory(card);
    memory->free = memory->total - memory->used - memory->reserved;
    if (card->told_used >= 0) memory->used = (unsigned long long)card->told_used;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    ENTER_CARD(device)
    if (card->mig) {
        answer = NVML_ERROR_NOT_SUPPORTED;
        break;
    }
    rates->gpu = busy(card, 0);
    rates->memory = busy(card, 1);
    LEAVE
}

#define NO_CODEC(function)                                                                   \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *busy_, unsigned *period) {   \
        ENTER_CARD(device)                                                                   \
        *busy_ = 0;                                                                          \
        *period = 167000;                                                                    \
        LEAVE                                                                                \
    }

NO_CODEC(nvmlDeviceGetEncoderUtilization)
NO_CODEC(nvmlDeviceGetDecoderUtilization)

static nvmlReturn_t list(const char *call, nvmlDevice_t device, kind_t kind, unsigned *count,
                         nvmlProcessInfo_t *rows) {
    /* R535.54 wrote wider rows than every header before and after it reads. */
    const size_t size = strstr(call, "_v3") != NULL ? row_bytes : sizeof *rows;
    pthread_mutex_lock(&lock);
    nvmlReturn_t answer;
    card_t *card = NULL;
    if (!initialised)
        answer = NVML_ERROR_UNINITIALIZED;
    else if (!refresh())
        answer = NVML_ERROR_DRIVER_NOT_LOADED;
    else if ((card = card_of(device)) == NULL)
        answer = NVML_ERROR_GPU_IS_LOST;
    else if ((answer = begin(call, card)) == NVML_SUCCESS)
        *count = claimed; /* a fault with code 0: success with nothing */
    else if (answer == GO_ON && (card = card_of(device)) == NULL)
        answer = NVML_ERROR_GPU_IS_LOST;
    else if (answer == GO_ON) {
        unsigned found = 0;
        answer = NVML_SUCCESS;
        const instance_t *instance = instance_of(device);
        for (unsigned i = 0; i < process_count; i++) {
            const process_t *process = &processes[i];
            if (process->card != card->index || !process->listed || process->kind != kind)
                continue;
            if (instance != NULL && (process->gi != instance->gi || process->ci != instance->ci))
                continue;
            if (found < *count && rows != NULL) {
                const nvmlProcessInfo_t row = {
                    .pid = process->pid,
                    .usedGpuMemory = process->memory,
                    .gpuInstanceId = process->gi,
                    .computeInstanceId = process->ci,
                };
                char *place = (char *)rows + found * size;
                memset(place, 0, size);
                memcpy(place, &row, sizeof row < size ? sizeof row : size);
            }
            found++;
        }
        if (found > *count || (rows == NULL && found > 0)) answer = NVML_ERROR_INSUFFICIENT_SIZE;
        *count = found;
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

#define LIST(function, kind)                                                                  \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *rows) { \
        return list(__func__, device, kind, count, rows);                                     \
    }

LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS)

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                    nvmlProcessUtilizationSample_t *samples,
                                                    unsigned *count,
                                                    unsigned long long last_seen) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t answer;
    card_t *card = NULL;
    if (!initialised)
        answer = NVML_ERROR_UNINITIALIZED;
    else if (!refresh())
        answer = NVML_ERROR_DRIVER_NOT_LOADED;
    else if ((card = card_of(device)) == NULL)
        answer = NVML_ERROR_GPU_IS_LOST;
    else if ((answer = begin(__func__, card)) == NVML_SUCCESS)
        *count = claimed;
    else if (answer == GO_ON && (card = card_of(device)) == NULL)
        answer = NVML_ERROR_GPU_IS_LOST;
    else if (answer == GO_ON && card->mig)
        answer = NVML_ERROR_NOT_SUPPORTED;
    else if (answer == GO_ON) {
        unsigned found = 0;
        unsigned long long now = walltime_us();
        for (unsigned i = 0; i < process_count; i++) {
            const process_t *process = &processes[i];
            /* As on real cards, a process that ran nothing has no sample. */
            if (process->card != card->index || (process->sm == 0 && process->mem == 0)) continue;
            /* Samples outlive their process in the driver's buffer: with an age they stay. */
            if (!process->alive && !(process->listed && process->sample_age > 0.0)) continue;
            unsigned long long taken =
                now - (unsigned long long)(long long)(process->sample_age * 1e6);
            taken -= taken % SAMPLE_US;
            if (taken <= last_seen) continue;
            if (samples != NULL && found < *count)
                samples[found] = (nvmlProcessUtilizationSample_t){
                    .pid = process->pid,
                    .timeStamp = taken,
                    .smUtil = process->sm,
                    .memUtil = process->mem,
                };
            found++;
        }
        if (found == 0)
            answer = NVML_ERROR_NOT_FOUND;
        else if (samples == NULL || found > *count)
            answer = NVML_ERROR_INSUFFICIENT_SIZE;
        else
            answer = NVML_SUCCESS;
        *count = found;
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

/* ------------------------------------------------------------------------------------------- */
/* Heat, power, clocks, errors */

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                             unsigned *celsius) {
    ENTER_CARD(device)
    if (sensor != NVML_TEMPERATURE_GPU) {
        answer = NVML_ERROR_NOT_SUPPORTED;
        break;
    }
    *celsius = card->temperature;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *reading) {
    ENTER_CARD(device)
    reading->temperature = (int)card->temperature;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *power) {
    ENTER_CARD(device)
    *power = milliwatts(card);
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *limit) {
    ENTER_CARD(device)
    *limit = card->limit * 1000;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *limit) {
    ENTER_CARD(device)
    *limit = card->limit * 1000;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device,
                                                        unsigned long long *energy) {
    ENTER_CARD(device)
    /* Idle power since boot: grows, and never falls when a load ends. */
    *energy = card->energy + (unsigned long long)(boottime() / 1000000000) * 55000ULL;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                           unsigned *clock) {
    ENTER_CARD(device)
    *clock = type == NVML_CLOCK_MEM ? card->memory_clock : card->sm_clock;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                              unsigned *clock) {
    ENTER_CARD(device)
    *clock = type == NVML_CLOCK_MEM ? card->memory_clock : card->sm_clock;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device,
                                                           unsigned long long *reasons) {
    ENTER_CARD(device)
    *reasons = card->throttle;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
                                                              unsigned long long *reasons) {
    ENTER_CARD(device)
    *reasons = card->throttle;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                                nvmlEccCounterType_t counter,
                                                unsigned long long *count) {
    (void)counter;
    ENTER_CARD(device)
    *count = type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? card->corrected : card->uncorrected;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *speed) {
    (void)speed;
    ENTER_CARD(device)
    answer = NVML_ERROR_NOT_SUPPORTED; /* as on every data-centre card */
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state) {
    ENTER_CARD(device)
    *state = NVML_PSTATE_0;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode) {
    ENTER_CARD(device)
    *mode = (nvmlComputeMode_t)card->compute_mode;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device,
                                                nvmlPcieUtilCounter_t counter, unsigned *rate) {
    ENTER_CARD(device)
    *rate = counter == NVML_PCIE_UTIL_TX_BYTES ? 1000 : 2000;
    LEAVE
}

/* ------------------------------------------------------------------------------------------- */
/* Field values: counters of traffic */

static nvmlReturn_t field(const card_t *card, nvmlFieldValue_t *value) {
    unsigned long long count;
    switch (value->fieldId) {
        case NVML_FI_DEV_PCIE_COUNT_TX_BYTES: count = card->pcie_transmit; break;
        case NVML_FI_DEV_PCIE_COUNT_RX_BYTES: count = card->pcie_receive; break;
        case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: count = card->nvlink_transmit >> 10; break;
        case NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: count = card->nvlink_receive >> 10; break;
        default: return NVML_ERROR_NOT_SUPPORTED;
    }
    value->timestamp = (long long)walltime_us();
    value->latencyUsec = 0;
    if (value->fieldId >= NVML_FI_DEV_PCIE_COUNT_TX_BYTES && card->pcie_bits == 32) {
        value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        value->value.uiVal = (unsigned)count;
    } else {
        value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        value->value.ullVal = count;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                             nvmlFieldValue_t *values) {
    ENTER_CARD(device)
    for (int i = 0; i < count; i++) values[i].nvmlReturn = field(card, &values[i]);
    LEAVE
}

/* ------------------------------------------------------------------------------------------- */
/* GPM: what happened between two samples */

struct nvmlGpmSample_st {
    int64_t taken; /* CLOCK_BOOTTIME ns, 0 while nothing was sampled */
    unsigned card, gi;
    double graphics, tensor;
};

/* Samples closer together than this tell nothing. */
static const int64_t GPM_PERIOD_NS = 100 * 1000 * 1000;

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) {
    ENTER_CARD(device)
    if (support->version != NVML_GPM_SUPPORT_VERSION) {
        answer = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
        break;
    }
    support->isSupportedDevice = card->gpm;
    LEAVE
}

EXPORT nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    ENTER_SYSTEM
    *sample = calloc(1, sizeof **sample);
    if (*sample == NULL) answer = NVML_ERROR_MEMORY;
    LEAVE
}

EXPORT nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    ENTER_SYSTEM
    free(sample);
    LEAVE
}

EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) {
    ENTER_CARD(device)
    if (!card->gpm) {
        answer = NVML_ERROR_NOT_SUPPORTED;
        break;
    }
    *sample = (struct nvmlGpmSample_st){boottime(), card->index, NO_INSTANCE, busy(card, 0),
                                        card->tensor};
    LEAVE
}

EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned gpu_instance,
                                        nvmlGpmSample_t sample) {
    ENTER_CARD(device)
    answer = card->gpm ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
    for (unsigned i = 0; i < instance_count && card->gpm; i++) {
        if (instances[i].card != card->index || instances[i].gi != gpu_instance) continue;
        unsigned sum = 0;
        for (unsigned p = 0; p < process_count; p++)
            if (processes[p].card == card->index && processes[p].gi == gpu_instance &&
                processes[p].alive)
                sum += processes[p].sm;
        *sample = (struct nvmlGpmSample_st){boottime(), card->index, gpu_instance,
                                            sum < 100 ? sum : 100, instances[i].tensor};
        answer = NVML_SUCCESS;
        break;
    }
    LEAVE
}

EXPORT nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *wanted) {
    ENTER_SYSTEM
    if (wanted->version != NVML_GPM_METRICS_GET_VERSION) {
        answer = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
        break;
    }
    const nvmlGpmSample_t first = wanted->sample1, second = wanted->sample2;
    if (first->taken == 0 || second->taken < first->taken || first->card != second->card ||
        first->gi != second->gi) {
        answer = NVML_ERROR_INVALID_ARGUMENT;
        break;
    }
    for (unsigned i = 0; i < wanted->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &wanted->metrics[i];
        metric->nvmlReturn = NVML_SUCCESS;
        if (second->taken - first->taken < GPM_PERIOD_NS)
            metric->nvmlReturn = NVML_ERROR_NO_DATA;
        else if (metric->metricId == NVML_GPM_METRIC_GRAPHICS_UTIL)
            metric->value = (first->graphics + second->graphics) / 2;
        else if (metric->metricId == NVML_GPM_METRIC_ANY_TENSOR_UTIL)
            metric->value = (first->tensor + second->tensor) / 2;
        else
            metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
    LEAVE
}

/* ------------------------------------------------------------------------------------------- */
/* Events: a change of an xid line's count is as many errors */

static unsigned long long *delivered(nvmlEventSet_t set, nvmlDevice_t device, unsigned code) {
    for (unsigned i = 0; i < set->known_count; i++)
        if (set->known[i].device == device && set->known[i].code == code)
            return &set->known[i].count;
    if (set->known_count >= MAX_XIDS) return NULL;
    set->known[set->known_count].device = device;
    set->known[set->known_count].code = code;
    set->known[set->known_count].count = 0;
    return &set->known[set->known_count++].count;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER_SYSTEM
    answer = NVML_ERROR_MEMORY;
    for (unsigned i = 0; i < MAX_SETS; i++) {
        if (sets[i].used) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].used = 1;
        *set = &sets[i];
        answer = NVML_SUCCESS;
        break;
    }
    LEAVE
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    ENTER_SYSTEM
    set->used = 0;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device,
                                                     unsigned long long *types) {
    ENTER_CARD(device)
    *types = nvmlEventTypeXidCriticalError;
    LEAVE
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                             nvmlEventSet_t set) {
    ENTER_CARD(device)
    if ((types & ~(unsigned long long)nvmlEventTypeXidCriticalError) != 0) {
        answer = NVML_ERROR_NOT_SUPPORTED;
        break;
    }
    if (set->device_count >= MAX_CARDS) {
        answer = NVML_ERROR_INSUFFICIENT_RESOURCES;
        break;
    }
    set->devices[set->device_count++] = device;
    /* What happened before is nobody's to hear. */
    for (unsigned i = 0; i < xid_count; i++) {
        unsigned long long *known =
            xids[i].card == card->index ? delivered(set, device, xids[i].code) : NULL;
        if (known != NULL) *known = xids[i].count;
    }
    LEAVE
}

/* With the lock held: whether something happened on the set's cards. */
static int event(nvmlEventSet_t set, nvmlEventData_t *data) {
    for (unsigned d = 0; d < set->device_count; d++) {
        const card_t *card = card_of(set->devices[d]);
        for (unsigned i = 0; card != NULL && i < xid_count; i++) {
            if (xids[i].card != card->index) continue;
            unsigned long long *known = delivered(set, set->devices[d], xids[i].code);
            if (known == NULL || xids[i].count <= *known) continue;
            ++*known;
            *data = (nvmlEventData_t){
                .device = set->devices[d],
                .eventType = nvmlEventTypeXidCriticalError,
                .eventData = xids[i].code,
                .gpuInstanceId = NO_INSTANCE,
                .computeInstanceId = NO_INSTANCE,
            };
            return 1;
        }
    }
    return 0;
}

static nvmlReturn_t wait_for(const char *call, nvmlEventSet_t set, nvmlEventData_t *data,
                             unsigned milliseconds) {
    const int64_t deadline = boottime() + (int64_t)milliseconds * 1000000;
    ENTER
    if ((answer = begin(call, NULL)) != GO_ON) break;
    answer = NVML_SUCCESS;
    for (;;) {
        if (event(set, data)) break;
        if (boottime() >= deadline) {
            answer = NVML_ERROR_TIMEOUT;
            break;
        }
        /* Seldom enough to cost nothing: on a real driver the waiting thread sleeps. */
        const int64_t left = deadline - boottime(), longest = 500 * 1000000;
        const struct timespec rest = {0, left < longest ? (left > 0 ? left : 0) : longest};
        pthread_mutex_unlock(&lock); /* who waits must not keep the others waiting */
        nanosleep(&rest, NULL);
        pthread_mutex_lock(&lock);
        if (!initialised || !set->used) {
            answer = NVML_ERROR_UNINITIALIZED;
            break;
        }
        if (!refresh()) {
            answer = NVML_ERROR_DRIVER_NOT_LOADED;
            break;
        }
    }
    LEAVE
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data,
                                        unsigned milliseconds) {
    return wait_for(__func__, set, data, milliseconds);
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data,
                                     unsigned milliseconds) {
    return wait_for(__func__, set, data, milliseconds);
}
