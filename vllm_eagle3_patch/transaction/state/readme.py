"""The text in our state folder: how to get the originals back without this tool."""

NAME = "README"

TEXT = """\
This folder belongs to vllm-eagle3-patch, which changed some files of the package
`vllm` beside it. It holds the original files and what is known of them:

  manifest.json  which files were changed, with the SHA-256 of each before and after
  verified.json  what verify showed, by the contents that it ran
  originals/     the original files themselves: the very inodes, or symbolic links
  copies/        copies of their bytes, for when an original cannot be used
  edited/        files that were overwritten although someone had edited them, and last
                 copies of originals that vLLM was installed over
  previous/, journal.json, concluded.json
                 there only during a run, or after one that was interrupted

To restore everything:

  vllm-eagle3-patch revert

The same without the tool, in the folder that holds `vllm` and this folder, as long
as the files are as "written" in manifest.json says (sha256sum): where vLLM was upgraded
or reinstalled since, or someone edited them, this would replace that with what was
there before. What is in originals/ wins over what is in copies/:

  for kept in "$PWD"/.vllm-eagle3-patch/copies/* "$PWD"/.vllm-eagle3-patch/originals/*; do
    (cd "$kept" && find vllm ! -type d -exec mv -f {} ../../../{} \\;)
  done

Compare the files with "original" in manifest.json (sha256sum), or reinstall vLLM if they
differ. Then remove this folder, the `__pycache__` folders beside the restored files, and
what an interrupted run left beside them (names that begin with a dot and hold
`vllm-eagle3-patch`).
"""
