"""Device code for NVIDIA GPUs in CuTe DSL.

Importing this package does not import cutlass; the modules with kernels do. A way to read it:

1. The shape of things (no cutlass): config (shapes, choices, shared memory), tiles (who computes
   what), pack and kv_layout (how weights, activations, keys and values lie), board (how CTAs agree
   on a step), arguments (the kernel's table).
2. The rules of memory: sync (every access that another SM sees; words as flags; deadlines), mapped
   (the same for the host's memory), ring (the weight stream), pages (of keys and values); what sync
   also says: ptx, shared (shared memory), words (in registers).
3. One token: kernel (roles and the loop), producer (the warp that streams), core (what the parts
   share), embed, gemm and epilogue (the four matrices of a layer and the head), attention and its
   parts (rotary, attention_stream, attention_blocks, attention_tail, attention_merge), head
   (results), janitor (words back to EMPTY).
4. A prompt: prompt, rows_gemm and rows_pairs (a matrix for many rows, for up to 64), rows_ends,
   prompt_attention, prompt_plan.
5. A speculative step: compact, context, draft_attention, rank and topk, tree, verify, decide.
6. The loop without a host: service (between launch and park), admission, control, service_block.
7. Building and running: build, load, entry (how kernels begin); phase, prompt_kernel and
   attention_kernel (parts as kernels of their own), scripted and script (a list of steps instead of
   a host), echo and probes (the wire and the rules of memory on their own).
"""
