# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = module.kv_cache.data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

# ARNs that a plan does not know yet, so that what refers to them can be compared.
override_resource {
  target          = module.kv_cache.aws_iam_policy.access["reader"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/reader" }
}

override_resource {
  target          = module.kv_cache.aws_iam_policy.access["writer"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/writer" }
}

override_resource {
  target          = module.kv_cache.aws_iam_role.eks["engine"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:role/engine" }
}

override_resource {
  target          = module.kv_cache.aws_iam_role.eks["canary"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:role/canary" }
}

override_resource {
  target          = aws_kms_key.kv_cache
  override_during = plan
  values          = { arn = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555", policy = "" }
}

run "example_minimal" {
  command = plan

  module {
    source = "./examples/minimal"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}

run "example_eks_pod_identity" {
  command = plan

  module {
    source = "./examples/eks-pod-identity"
  }

  variables {
    cluster_name      = "gpu"
    vpc_id            = "vpc-1"
    route_table_ids   = ["rtb-1"]
    model_bucket_name = "models"
    alarm_topic_arn   = "arn:aws:sns:us-east-1:111122223333:pager"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}

run "example_eks_irsa" {
  command = plan

  module {
    source = "./examples/eks-irsa"
  }

  variables {
    oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.us-east-1.amazonaws.com/id/ABC"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}

run "example_express" {
  command = plan

  module {
    source = "./examples/express"
  }

  assert {
    condition     = output.bucket == "my-kv-cache--use1-az4--x-s3"
    error_message = "the bucket must be named by its zone"
  }
}

run "example_kms" {
  command = plan

  module {
    source = "./examples/kms"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config.bucket == "my-kv-cache"
    error_message = "the example must print what vLLM is to be given"
  }
}
