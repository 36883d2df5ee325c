#include "graphs.h"
#include "client/run_context.h"
#include "client/sha256.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

enum { VERSION = 3, MAX_LENGTHS = 8, MAX_PEAKS = 16, UNLIKE_V68 = 73 /* the value in ../chips.py */, MAX_SOC_ID_DIGITS = 15 };

static const char SUITS[] = "does not suit this model; make them again with `neuronpipe compile`";
static const char SOC_ID[] = "/sys/devices/soc0/soc_id";

static Scale scale_of(const char *json, const std::string &path)
{
    const Scale scale = {json_real(json, (path + "/step").c_str()), static_cast<uint32_t>(json_number(json, (path + "/zero").c_str()))};
    if (!(scale.step > 0) || !std::isfinite(scale.step) || scale.zero > MOST)
        run_fail(path.c_str(), SUITS);
    return scale;
}

static std::string text_of(const char *json, const char *path)
{
    char *text = json_text(json, path);
    const std::string copy = text;
    free(text);
    return copy;
}

/* A file's path, after comparing its checksum: the runtime would silently compute a damaged context. */
static std::string checked_file(const std::string &folder, const char *graph, size_t number)
{
    const char *file = json_item(graph, "files", number), *checksum = json_item(graph, "sha256", number);
    if (!file || !checksum)
        run_fail("files", SUITS);
    const std::string name = text_of(file, "");
    size_t bytes = 0;
    char *content = run_read_file(folder.c_str(), name.c_str(), &bytes), sum[65];
    sha256_text(content, bytes, sum);
    free(content);
    if (text_of(checksum, "") != sum)
        run_fail((folder + "/" + name).c_str(), "does not match its checksum; make it again with `neuronpipe compile`");
    return folder + "/" + name;
}

/* The kernel's number of this machine's chip; 0 if it is unknown. */
static uint64_t machine_soc_id()
{
    char digits[MAX_SOC_ID_DIGITS + 1] = {0};
    FILE *file = fopen(SOC_ID, "r");
    if (!file)
        return 0;
    const size_t count = fread(digits, 1, MAX_SOC_ID_DIGITS, file);
    fclose(file);
    return count ? strtoull(digits, nullptr, 10) : 0;
}

/* Returns true if these are contexts; they are then checked to suit this chip and runtime. Sets the numerics. */
static bool is_prepared(const std::string &folder, const char *index, const Runtime &runtime, std::string &numerics)
{
    const Provider &provider = runtime.provider();
    const std::string path = folder + "/graphs.json";
    numerics = provider.is_plugin ? "htp-v73" : "onnx-cpu";
    if (!json_has(index, "chip")) {
        if (provider.needs_device || provider.soc)
            throw RuntimeError(path + ": has no contexts for a chip; `neuronpipe compile PACKAGE --soc SOC` makes them");
        return false;
    }
    const uint64_t soc = json_number(index, "chip/soc"), arch = json_number(index, "chip/arch");
    const std::string chip = text_of(index, "chip/name"), again = "; compile again: `neuronpipe compile PACKAGE --soc SOC`";
    if (!provider.is_plugin)
        throw RuntimeError(path + ": has contexts for " + chip + ", which --provider cpu cannot compute" + again.substr(0, 1) +
                           " name graphs by --graphs");
    if (provider.soc && provider.soc != soc)
        throw RuntimeError(path + ": has contexts for soc " + std::to_string(soc) + ", not for soc " + std::to_string(provider.soc) + again);
    const std::string prepared = text_of(index, "qnn"), here = runtime.qnn_version();
    if (prepared != here)
        throw RuntimeError(path + ": QNN " + prepared + " prepared these contexts, and this one is " + here + again);
    if (provider.needs_device) {
        const uint64_t soc_id = machine_soc_id();
        bool is_known = !soc_id || !json_item(index, "chip/soc_ids", 0);
        for (size_t n = 0; const char *id = json_item(index, "chip/soc_ids", n); n++)
            is_known = is_known || json_number(id, "") == soc_id;
        if (!is_known)
            throw RuntimeError(path + ": has contexts for " + chip + ", and this machine's soc_id is " + std::to_string(soc_id) + again);
    }
    numerics = provider.needs_device ? "hexagon-v" + std::to_string(arch) : arch >= UNLIKE_V68 ? "htp-v73" : "htp-v68";
    return true;
}

/* Sessions for the needed lengths: up to the first that holds the longest step. */
static GraphLengths lengths_of(const std::string &folder, const char *index, const char *graph, uint32_t max_tokens, bool prepared, Runtime &runtime)
{
    GraphLengths lengths;
    uint64_t longest = 0;
    for (size_t n = 0; n < MAX_LENGTHS && longest < max_tokens; n++) {
        const char *length = json_item(index, "tokens", n);
        if (!length)
            break;
        const uint64_t tokens = json_number(length, "");
        if (tokens <= longest || tokens > MOST)
            run_fail("tokens", SUITS);
        longest = tokens;
        lengths.sessions.emplace_back(static_cast<uint32_t>(tokens), runtime.session(checked_file(folder, graph, n), prepared));
    }
    if (lengths.sessions.empty())
        run_fail("tokens", SUITS);
    return lengths;
}

Graphs::Graphs(const std::string &folder, const np_shape &shape, uint32_t max_tokens, Runtime &runtime)
{
    const std::string activation = shape.activation == NP_DRELU ? "drelu" : "relu";
    char *text = run_read_file(folder.c_str(), "graphs.json", nullptr);
    if (json_number(text, "version") != VERSION)
        run_fail((folder + "/graphs.json").c_str(), "is of another version; make it again with `neuronpipe compile`");
    const bool prepared = is_prepared(folder, text, runtime, numerics);
    const uint64_t of_one_product = json_number(text, "neurons");
    if (json_number(text, "width") != shape.width || text_of(text, "activation") != activation || of_one_product < shape.block_neurons ||
        of_one_product > INT32_MAX / shape.width)
        run_fail((folder + "/graphs.json").c_str(), SUITS);
    neurons = static_cast<uint32_t>(of_one_product);
    max_neurons = static_cast<uint32_t>(json_number(text, "most_neurons"));
    for (size_t n = 0; const char *matrix = json_item(text, "matrices", n); n++) {
        const uint64_t rows = json_number(matrix, "rows"), columns = json_number(matrix, "columns");
        if (!rows || !columns || rows > INT32_MAX || columns > INT32_MAX / rows)
            run_fail("matrices", SUITS);
        matrices.push_back({static_cast<uint32_t>(rows), static_cast<uint32_t>(columns), scale_of(matrix, "x"), scale_of(matrix, "y"),
                            lengths_of(folder, text, matrix, max_tokens, prepared, runtime)});
    }
    const char *block = strstr(text, "\"feed_forward\"");
    if (!block || !json_has(text, "feed_forward"))
        run_fail("feed_forward", SUITS);
    by_token = text_of(text, "scaling") == "token";
    x = scale_of(text, "feed_forward/x");
    factor = scale_of(text, "feed_forward/factor");
    y = scale_of(text, "feed_forward/y");
    for (size_t n = 0; const char *peak = json_item(text, "feed_forward/peaks", n); n++) {
        if (n == MAX_PEAKS)
            run_fail("peaks", SUITS);
        peaks.push_back({text_of(peak, "name"), json_truth(peak, "signed") != 0});
    }
    feed_forward = lengths_of(folder, text, block + strcspn(block, "{"), max_tokens, prepared, runtime);
    free(text);
}
