/*
 * A stand-in for NVIDIA's pyxis: it takes the options of pyxis, checks what pyxis would need with its words, and runs each
 * task on the host itself. plugstack.conf names a file with record=FILE, in which every task leaves a line of JSON, and with
 * env=NAME=VALUE what an image or its host's hooks would add to the environment. As with pyxis a named container stays on
 * its host, and later tasks run in it whatever their image; see test_pyxis.py for what both do.
 */
#include <fcntl.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1);

enum option { IMAGE, MOUNTS, WORKDIR, NAME, ENV, MOUNT_HOME, NO_MOUNT_HOME, WRITABLE, REMAP_ROOT, OPTIONS };

static int take(int option, const char *argument, int remote);

static struct spank_option options[OPTIONS] = {
    {"container-image", "IMAGE|FILE", "[pyxis] image, or the path of a squashfs file", 1, IMAGE, take},
    {"container-mounts", "SRC:DST[:FLAGS],...", "[pyxis] host paths to mount", 1, MOUNTS, take},
    {"container-workdir", "PATH", "[pyxis] working directory", 1, WORKDIR, take},
    {"container-name", "NAME", "[pyxis] name of the container", 1, NAME, take},
    {"container-env", "NAME,...", "[pyxis] variables of the host that win over the image's", 1, ENV, take},
    {"container-mount-home", NULL, "[pyxis] mount the home directory", 0, MOUNT_HOME, take},
    {"no-container-mount-home", NULL, "[pyxis] do not mount the home directory", 0, NO_MOUNT_HOME, take},
    {"container-writable", NULL, "[pyxis] a writable file system", 0, WRITABLE, take},
    {"container-remap-root", NULL, "[pyxis] be root inside", 0, REMAP_ROOT, take},
};
static char *values[OPTIONS];

static int take(int option, const char *argument, int remote)
{
    (void)remote;
    free(values[option]);
    values[option] = strdup(argument ? argument : "");
    return 0;
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    for (int option = 0; option < OPTIONS; option++)
        if (spank_option_register(spank, &options[option]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

static int fail(const char *format, ...)
{
    char text[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    slurm_error("pyxis: %s", text);
    return -1;
}

static int fail_to_create(const char *image)
{
    slurm_error("pyxis: child %d failed with error code: 1", getpid());
    slurm_error("pyxis: failed to create container filesystem for image: %s", image);
    slurm_error("pyxis: printing enroot log file:");
    return fail("    [ERROR] No such file or directory: %s", image);
}

/* SRC[:DST[:FLAGS]],...: the first source that is not there fails. */
static int check_mounts(const char *mounts)
{
    char *copy = strdup(mounts), *rest = copy;
    for (char *mount; (mount = strsep(&rest, ","));) {
        mount[strcspn(mount, ":")] = '\0';
        if (*mount && access(mount, F_OK) != 0)
            return fail("--container-mounts: source path does not exist: %s", mount);
    }
    free(copy);
    return 0;
}

static void write_string(FILE *to, const char *key, const char *value)
{
    fprintf(to, ", \"%s\": ", key);
    if (!value) {
        fputs("null", to);
        return;
    }
    fputc('"', to);
    for (; *value; value++) {
        if ((unsigned char)*value < ' ')
            fprintf(to, "\\u%04x", *value);
        else
            fprintf(to, strchr("\"\\", *value) ? "\\%c" : "%c", *value);
    }
    fputc('"', to);
}

/* A named container's image on this host, kept in a file; NULL without a name. */
static const char *kept_image(const char *record_path)
{
    static char image[4096];
    char host[256] = "", path[8192];
    if (!values[NAME])
        return NULL;
    gethostname(host, sizeof host - 1);
    const char *slash = strrchr(record_path, '/');
    snprintf(path, sizeof path, "%.*s/%s/enroot/%s", (int)(slash - record_path), record_path, host, values[NAME]);
    FILE *file = fopen(path, "r");
    if (file && fgets(image, sizeof image, file)) {
        fclose(file);
        return image;
    }
    if (values[IMAGE] && (file = fopen(path, "w"))) {
        fputs(values[IMAGE], file);
        fclose(file);
    }
    return NULL;
}

static bool is_named(const char *names, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = names; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, length) == 0 && strchr(",", at[length]))
            return true;
    return false;
}

static int record(spank_t spank, const char *path, const char *runs)
{
    uint32_t job = 0, step = 0, task = 0;
    char host[256] = "", *line;
    size_t length;
    spank_get_item(spank, S_JOB_ID, &job);
    spank_get_item(spank, S_JOB_STEPID, &step);
    spank_get_item(spank, S_TASK_GLOBAL_ID, &task);
    gethostname(host, sizeof host - 1);

    FILE *to = open_memstream(&line, &length);
    fprintf(to, "{\"job\": %u, \"step\": ", job);
    fprintf(to, step == SLURM_BATCH_SCRIPT ? "\"batch\"" : "%u", step);
    fprintf(to, ", \"task\": %u", task);
    write_string(to, "node", host);
    write_string(to, "image", values[IMAGE]);
    write_string(to, "runs", runs);
    write_string(to, "mounts", values[MOUNTS]);
    write_string(to, "workdir", values[WORKDIR]);
    write_string(to, "name", values[NAME]);
    write_string(to, "env", values[ENV]);
    fprintf(to, ", \"mount_home\": %s", values[MOUNT_HOME] ? "true" : values[NO_MOUNT_HOME] ? "false" : "null");
    fprintf(to, ", \"writable\": %s", values[WRITABLE] ? "true" : "false");
    fprintf(to, ", \"remap_root\": %s}\n", values[REMAP_ROOT] ? "true" : "false");
    fclose(to);

    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    bool written = file >= 0 && write(file, line, length) == (ssize_t)length; /* one write: lines do not mix */
    close(file);
    free(line);
    return written ? 0 : fail("cannot write %s", path);
}

/* A daemon of a container stays a child of slurmstepd, which thereby ends it with the step, as cgroups do on a cluster. */
int slurm_spank_user_init(spank_t spank, int count, char **arguments)
{
    (void)spank, (void)count, (void)arguments;
    return values[IMAGE] || values[NAME] ? prctl(PR_SET_CHILD_SUBREAPER, 1) : 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    if (!values[IMAGE] && !values[NAME])
        return 0; /* no container: the other options mean nothing */
    const char *kept = NULL, *lost[] = {"LANG", "LANGUAGE", "LC_ALL", "LD_LIBRARY_PATH"};
    for (unsigned int each = 0; each < sizeof lost / sizeof *lost; each++)
        if (!is_named(values[ENV], lost[each]))
            spank_unsetenv(spank, lost[each]);
    for (int each = 0; each < count; each++)
        if (strncmp(arguments[each], "record=", 7) == 0)
            kept = kept_image(arguments[each] + 7);
    for (int each = 0; each < count; each++) {
        char *key = arguments[each], *value = strchr(key, '=') + 1;
        if (strncmp(key, "record=", 7) == 0 && record(spank, value, kept ? kept : values[IMAGE]) != 0)
            return -1;
        if (strncmp(key, "env=", 4) == 0) {
            char *name = strndup(value, strcspn(value, "="));
            spank_setenv(spank, name, value + strlen(name) + 1, !is_named(values[ENV], name));
            free(name);
        }
    }
    if (!kept && values[IMAGE] && strspn(values[IMAGE], "./") && access(values[IMAGE], R_OK) != 0)
        return fail_to_create(values[IMAGE]);
    if (values[MOUNTS] && check_mounts(values[MOUNTS]) != 0)
        return -1;
    if (values[WORKDIR] && chdir(values[WORKDIR]) != 0)
        return fail("couldn't chdir to %s: No such file or directory", values[WORKDIR]);
    return 0;
}
