# eval "$(packtrain completion bash)"; the last line of the function leaves file names to the shell
_packtrain() {
  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=
  if [[ $command == plan && $COMP_CWORD -gt 2 ]]; then command="plan ${COMP_WORDS[2]}"; fi
  if [[ $COMP_CWORD == 1 ]]; then words=@commands@
  elif [[ $command == plan ]]; then words='train finetune'
  else case "$command $previous" in
@choices@
  *) if [[ $word == -* ]]; then case "$command" in
@options@
  esac; fi;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _packtrain packtrain
