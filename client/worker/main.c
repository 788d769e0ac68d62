// qkv-worker: a small language model whose KV cache lives in qkvd.
#include "client/worker/worker.h"

// The rows that commands begin with.
// clang-format off
#define MODEL_OPTION                                                                                             \
  {"model", QKV_OPTION_STRING, offsetof(qkvi_worker, model), NULL, 0, 0, "PATH",                                 \
   "directory with config.json and model.safetensors of a byte-level model, or a .gguf file of the Llama family; " \
   "its name, without .gguf, is the model's name in the daemon"},                                                \
  {"threads", QKV_OPTION_INTEGER, offsetof(qkvi_worker, threads), "1", 0, 1024, "N",                             \
   "of the model's own arithmetic; 0: one for each processor"}
#define MODEL_OPTIONS                                                                                            \
  MODEL_OPTION,                                                                                                  \
  {"codec", QKV_OPTION_STRING, offsetof(qkvi_worker, codec), NULL, 0, 0, "NAME",                                 \
   "what codes keys and values: embedded, exact or another codec of the daemon's table; its default when not given"}, \
  {"codec-v", QKV_OPTION_STRING, offsetof(qkvi_worker, codec_v), NULL, 0, 0, "NAME",                             \
   "the same for values alone"},                                                                                 \
  {"bits", QKV_OPTION_REAL, offsetof(qkvi_worker, bits), "0", 0, 16, "BITS",                                     \
   "code bits per coordinate, on average over all keys and values; 0: the daemon's default"},                    \
  {"bits-k", QKV_OPTION_REAL, offsetof(qkvi_worker, bits_k), "0", 0, 16, "BITS",                                 \
   "the same for keys alone; 0: --bits"},                                                                        \
  {"bits-v", QKV_OPTION_REAL, offsetof(qkvi_worker, bits_v), "0", 0, 16, "BITS",                                 \
   "the same for values alone; 0: --bits"},                                                                      \
  {"max-attention-error", QKV_OPTION_REAL, offsetof(qkvi_worker, max_attention_error), "0", 0, 1, "ERROR",       \
   "quality contract: fewer bits as long as the relative error of attention's output stays below; 0: none"}
// clang-format on

static const qkv_option generate_options[] = {
    MODEL_OPTIONS,
    {"prompt", QKV_OPTION_STRING, offsetof(qkvi_worker, prompt), NULL, 0, 0, "FILE", "the text to continue"},
    {"chat", QKV_OPTION_FLAG, offsetof(qkvi_worker, chat), NULL, 0, 0, NULL,
     "the text is a message to be answered: it is put into the model's chat template"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkvi_worker, tokens), "160", 1, 1 << 20, "N",
     "tokens to generate at most; a control token, for example that of an answer's end, ends the text before"},
    {"bytes", QKV_OPTION_INTEGER, offsetof(qkvi_worker, tokens), "160", 1, 1 << 20, "N",
     "the same, by its name for a byte-level model"},
    {"session", QKV_OPTION_STRING, offsetof(qkvi_worker, session), NULL, 0, 0, "NAME",
     "the session's name in the daemon; a name of its own when not given"},
    {"keep", QKV_OPTION_FLAG, offsetof(qkvi_worker, keep), NULL, 0, 0, NULL,
     "leave the session open in the daemon at the end"},
    {"durability", QKV_OPTION_STRING, offsetof(qkvi_worker, durability), NULL, 0, 0, "KIND",
     "of the session: memory, async or sync; the daemon's when not given"},
    {"temperature", QKV_OPTION_REAL, offsetof(qkvi_worker, temperature), "0", 0, 100, "T",
     "of the sampling; 0 takes the likeliest token"},
    {"seed", QKV_OPTION_INTEGER, offsetof(qkvi_worker, seed), "1", 0, 9007199254740992.0, "N", "of the sampling"},
    {"compare", QKV_OPTION_FLAG, offsetof(qkvi_worker, compare), NULL, 0, 0, NULL,
     "run the exact fp32 cache, too, on the same tokens, and print how they differ; bits per token "
     "are "
     "then of the text that the model has just made itself, for held-out text see score"},
    QKV_PROGRAM_OPTIONS(qkvi_worker),
};

static const qkv_option score_options[] = {
    MODEL_OPTIONS,
    {"text", QKV_OPTION_LIST, offsetof(qkvi_worker, texts), NULL, 0, 0, "FILE",
     "text to score; may be given several times, the figures are then means over all windows"},
    {"frame", QKV_OPTION_STRING, offsetof(qkvi_worker, frame), "attend", 0, 0, "FRAME",
     "attend: a session to be attended; archive: one to be fetched, whose keys are coded before RoPE"},
    {"calibration", QKV_OPTION_STRING, offsetof(qkvi_worker, calibration), NULL, 0, 0, "FILE",
     "calibration file to register the model with, as calibrate writes it; without it the daemon codes as it would "
     "anyway"},
    {"anchor", QKV_OPTION_STRING, offsetof(qkvi_worker, anchor), NULL, 0, 0, "KIND",
     "what rows are predicted by: none, mean, group, chain or auto; the daemon's when not given"},
    {"demote-after", QKV_OPTION_INTEGER, offsetof(qkvi_worker, demote_after), "0", 0, 1 << 20, "TOKENS",
     "behind the prefill that are attended, not scored, before the session is demoted"},
    {"demote-bits", QKV_OPTION_REAL, offsetof(qkvi_worker, demote_bits), "0", 0, 8, "BITS",
     "ask the daemon to bring the session to this average, by the attention of all queries until then; 0: not asked"},
    {"demote-even", QKV_OPTION_FLAG, offsetof(qkvi_worker, demote_even), NULL, 0, 0, NULL,
     "bring all rows to at most demote-bits instead, whatever the attention"},
    {"windows", QKV_OPTION_INTEGER, offsetof(qkvi_worker, windows), "16", 1, 1 << 20, "N",
     "windows of each text, evenly spread"},
    {"prefill", QKV_OPTION_INTEGER, offsetof(qkvi_worker, prefill), "768", 1, 1 << 20, "TOKENS",
     "of a window whose keys and values live, coded, in the daemon"},
    {"length", QKV_OPTION_INTEGER, offsetof(qkvi_worker, length), "1024", 2, 1 << 20, "TOKENS",
     "of a window; those after the prefill are scored. attend_us_p50 and _p99 are times of calls in which they all, "
     "but at most 256, are queries over the prefill"},
    QKV_PROGRAM_OPTIONS(qkvi_worker),
};

static const qkv_option calibrate_options[] = {
    MODEL_OPTION,
    {"text", QKV_OPTION_LIST, offsetof(qkvi_worker, texts), NULL, 0, 0, "FILE",
     "text to learn from, in windows; may be given several times"},
    {"output", QKV_OPTION_STRING, offsetof(qkvi_worker, output), NULL, 0, 0, "FILE",
     "the calibration file to write; one that is there is replaced"},
    {"codec", QKV_OPTION_STRING, offsetof(qkvi_worker, codec), NULL, 0, 0, "NAME",
     "a codec that sessions will use: what it makes of a calibration, as the codebooks of pq and commvq, goes into "
     "the file; without it daemons make that at its first use"},
    {"bits", QKV_OPTION_REAL, offsetof(qkvi_worker, bits), "0", 0, 8, "BITS",
     "code bits per coordinate of that codec; 0: for all that it has"},
    {"untried", QKV_OPTION_FLAG, offsetof(qkvi_worker, untried), NULL, 0, 0, NULL,
     "learn from all of the text, and do not try on some of it what was learnt: a daemon will"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkvi_worker, tokens), "0", 0, 1e15, "N",
     "of the texts to learn from, from the beginning; 0: all"},
    {"length", QKV_OPTION_INTEGER, offsetof(qkvi_worker, length), "1024", 2, 1 << 20, "TOKENS",
     "of a window, at most the model's context"},
    QKV_PROGRAM_OPTIONS(qkvi_worker),
};

static const qkv_option dump_options[] = {
    MODEL_OPTION,
    {"text", QKV_OPTION_LIST, offsetof(qkvi_worker, texts), NULL, 0, 0, "FILE", "the text, one file"},
    {"output", QKV_OPTION_STRING, offsetof(qkvi_worker, output), NULL, 0, 0, "FILE",
     "the .safetensors file to write, layers.N.k, .v and .q in fp32 after RoPE; one that is there is replaced"},
    {"length", QKV_OPTION_INTEGER, offsetof(qkvi_worker, length), "1024", 1, 1 << 20, "TOKENS",
     "from the text's beginning, at most the model's context"},
    QKV_PROGRAM_OPTIONS(qkvi_worker),
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const qkv_command commands[] = {
    {"generate", "", "continue a prompt, with the KV cache in the daemon; the text goes to standard output",
     generate_options, COUNT(generate_options), 0, 0, qkvi_generate},
    {"score", "", "measure what the daemon's codes cost in quality, against an exact fp32 cache", score_options,
     COUNT(score_options), 0, 0, qkvi_score},
    {"calibrate", "", "learn from text how the model's keys and values are best coded; needs no daemon",
     calibrate_options, COUNT(calibrate_options), 0, 0, qkvi_calibrate},
    {"dump", "", "write the keys, values and queries of a text to a file; needs no daemon", dump_options,
     COUNT(dump_options), 0, 0, qkvi_dump},
};

int main(int argc, char **argv) {
  qkvi_worker worker = {0};
  const qkv_command_set set = {"qkv-worker", "A small language model whose KV cache lives in qkvd.", commands,
                               COUNT(commands), &worker};
  return qkv_program_run(&set, argc, argv);
}
